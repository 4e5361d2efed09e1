// Writes pages and attends to them with made-up numbers, and prints what came of it: the same on every kind of CPU (`make test-arm`).
#include <cstdio>

#include "../../../kernels/cpu/csrc/paged.cpp"

static uint32_t state = 1;

static float random_float() {  // in [-1, 1), of 16 bits
  state = state * 1664525u + 1013904223u;
  return float(int(state >> 16) - 32768) / 32768.0f;
}

static void attend_to(const char* name, int k_kind, int v_kind, int channel_group, int groups, bool symmetric, long D) {
  const long T = 64, tokens = 150, heads = 2, G = 3, columns = 3, lists = heads;
  const bool k_coded = k_kind <= kvb::kCode8, v_coded = v_kind <= kvb::kCode8;
  auto side_bytes = [&](int kind) { return D / kvb::planes_of(kind) * kvb::unit_bytes_of(kind) * T; };
  auto round_up = [](long n) { return (n + 15) / 16 * 16; };
  kvb::Tier tier = {};
  tier.slots_per_page = T, tier.num_columns = columns, tier.k_channel_group = channel_group;
  auto side = [&](int kind, bool coded) {
    kvb::Code code = {};
    code.kind = kind, code.groups = groups;
    if (coded) code.scale = kvb::kF16Scale, code.zero = !symmetric, code.centre = 1 << (kvb::bits_of(kind) - 1);
    return code;
  };
  tier.k = side(k_kind, k_coded), tier.v = side(v_kind, v_coded);
  const long k_scales = round_up(!k_coded ? 0 : 2 * (channel_group ? T / channel_group * D : groups * T));
  const long v_scales = round_up(v_coded ? 2 * groups * T : 0);
  long at = 0;
  auto take = [&](long bytes) { return (at += bytes) - bytes; };
  tier.k_codes = take(side_bytes(k_kind)), tier.v_codes = take(side_bytes(v_kind));
  tier.k_scale = take(k_scales), tier.k_zero = take(symmetric ? 0 : k_scales);
  tier.v_scale = take(v_scales), tier.v_zero = take(symmetric ? 0 : v_scales);
  tier.score = tier.pos = -1;
  const long page_bytes = round_up(at), num_pages = lists * columns;
  std::vector<uint8_t> pages(page_bytes * num_pages);
  std::vector<int64_t> ids, held(lists, tokens);
  for (long i = 0; i < num_pages; i++) ids.push_back(num_pages - 1 - i);
  const long whole = channel_group ? (tokens + channel_group - 1) / channel_group * channel_group : tokens;
  for (long list = 0; list < lists; list++) {
    std::vector<int64_t> page, slot;
    std::vector<float> x;
    for (long t = 0; t < whole; t++) page.push_back(ids[list * columns + t / T]), slot.push_back(t % T);
    for (int key = 1; key >= 0; key--) {
      x.clear();
      for (long i = 0; i < whole * D; i++) x.push_back(3 * random_float());
      if (kvb_write(pages.data(), page_bytes, num_pages, &tier, key, whole, page.data(), slot.data(), x.data(), D, 1)) std::abort();
    }
  }
  tier.ids = ids.data(), tier.num_k = tier.num_v = held.data();
  std::vector<float> q(heads * G * D), out(q.size()), lse(heads * G), scores(lists * columns * T);
  for (float& x : q) x = 2 * random_float();
  tier.scores = scores.data();
  kvb::Call call = {};
  call.q = q.data(), call.pages = pages.data(), call.tiers = &tier, call.out = out.data(), call.lse = lse.data();
  call.page_bytes = page_bytes, call.num_pages = num_pages, call.seq_stride = heads, call.num_seq = 1, call.num_heads = heads;
  call.group_size = G, call.head_dim = D, call.num_tiers = call.power = call.num_threads = 1, call.reduce = kvb::kMax;
  call.scale = 1 / std::sqrt(float(D));
  if (kvb_paged_decode(&call)) std::abort();
  uint64_t hash = 14695981039346656037u;
  for (uint8_t byte : pages) hash = (hash ^ byte) * 1099511628211u;
  std::printf("%s D=%ld pages %016llx", name, D, (unsigned long long)hash);
  for (auto* values : {&out, &lse, &scores})
    for (float x : *values) std::printf(" %.9g", x);
  std::printf("\n");
}

int main() {
  using namespace kvb;
  for (long D : {64, 80, 128}) {
    attend_to("K8V4", kCode8, kCode4, 0, 1, false, D);
    attend_to("K4V2", kCode4, kCode2, 0, 1, false, D);
    attend_to("K2V1", kCode2, kCode1, 0, 2, false, D);
    attend_to("symmetric", kCode4, kCode4, 0, 1, true, D);
    attend_to("channel", kCode2, kCode2, 32, 1, false, D);
    attend_to("fp16", kF16, kF16, 0, 1, false, D);
    attend_to("bf16", kBF16, kBF16, 0, 1, false, D);
    attend_to("fp8", kFp8, kFp8, 0, 1, false, D);
  }
}
