// Which of the builds in kernels/cpu/abi.py this CPU can run. Compiled without any flag that a CPU might not know.
#if defined(__linux__) && defined(__x86_64__) && (defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
// Linux lets a process use tiles where it has requested them (ARCH_REQ_XCOMP_PERM of XFEATURE_XTILEDATA).
static bool amx_bf16() {
  unsigned a, b, c, d;
  const unsigned wanted = 1u << 22 | 1u << 24;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & wanted) == wanted && syscall(SYS_arch_prctl, 0x1023, 18) == 0;
}
#else
static bool amx_bf16() { return false; }
#endif

extern "C" const char* kvb_isa() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__builtin_cpu_supports("f16c")) return "portable";
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") || !__builtin_cpu_supports("avx512vl") ||
      !__builtin_cpu_supports("avx512dq"))
    return "avx2";
  if (!__builtin_cpu_supports("avx512vbmi") || !__builtin_cpu_supports("avx512vnni")) return "avx512";
  if (!__builtin_cpu_supports("avx512bf16")) return "avx512vnni";
  return amx_bf16() ? "amx" : "avx512bf16";
#else
  return "portable";
#endif
}
