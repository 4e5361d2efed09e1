// Which of the builds in kernels/cpu/abi.py this CPU can run. Compiled without any flag that a CPU might not know.
extern "C" const char* kvb_isa() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__builtin_cpu_supports("f16c")) return "portable";
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") || !__builtin_cpu_supports("avx512vl") ||
      !__builtin_cpu_supports("avx512dq"))
    return "avx2";
  if (!__builtin_cpu_supports("avx512vbmi") || !__builtin_cpu_supports("avx512vnni")) return "avx512";
  return __builtin_cpu_supports("avx512bf16") ? "avx512bf16" : "avx512vnni";
#else
  return "portable";
#endif
}
