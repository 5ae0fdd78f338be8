// What this library was built against and what the CPU under it can do, for kernels.info().

#include "exports.h"
#include "xla/ffi/api/c_api.h"

// The names are words of the Python side too (fewbit/kernels/_info.py).
extern "C" FEWBIT_EXPORT const char* fewbit_isa() {
#if defined(__x86_64__)
  // These four are what the AVX-512 kernels may use; the builtin asks the operating system too.
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni")) {
    return "avx512vnni";
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    return "avx2";
  }
#endif
  return "portable";
}

extern "C" FEWBIT_EXPORT const char* fewbit_jaxlib_version() { return FEWBIT_JAXLIB_VERSION; }

extern "C" FEWBIT_EXPORT int fewbit_ffi_api_major() { return XLA_FFI_API_MAJOR; }

extern "C" FEWBIT_EXPORT int fewbit_ffi_api_minor() { return XLA_FFI_API_MINOR; }
