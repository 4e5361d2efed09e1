// The kernels for a CPU, as a library. See host.h.
#define KVB_HOST
#include "decode.cu"

extern "C" void kvb_run_plan(const Call* call, int layers) {
  host::run(layers, 256, 64, [=] { kvb_plan(*call); });
}
extern "C" void kvb_run_decode(const Call* call, int blocks) {
  host::run(blocks, THREADS, sizeof(Shared), [=] { kvb_decode(*call); });
}
extern "C" void kvb_run_scores(const Call* call, int blocks) {
  host::run(blocks, 256, 64, [=] { kvb_scores(*call); });
}
extern "C" int kvb_call_bytes() { return sizeof(Call); }
extern "C" int kvb_shared_bytes() { return sizeof(Shared); }
