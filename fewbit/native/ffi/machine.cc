// What this library was built against and which kernels it runs here, for kernels.info(); and what
// its activations make of numbers, to be held against XLA's.

#include <cstdint>
#include <cstring>

#include "ffi/exports.h"
#include "common/finish.h"
#include "isa/isa.h"
#include "xla/ffi/api/c_api.h"

// The names are words of the Python side too (fewbit/kernels/_info.py).
extern "C" FEWBIT_EXPORT const char* fewbit_isa() { return fewbit::ChosenIsa().kernels->name; }

// Empty, or why FEWBIT_ISA cannot be followed.
extern "C" FEWBIT_EXPORT const char* fewbit_isa_problem() {
  return fewbit::ChosenIsa().problem.c_str();
}

extern "C" FEWBIT_EXPORT const char* fewbit_jaxlib_version() { return FEWBIT_JAXLIB_VERSION; }

extern "C" FEWBIT_EXPORT int fewbit_ffi_api_major() { return XLA_FFI_API_MAJOR; }

extern "C" FEWBIT_EXPORT int fewbit_ffi_api_minor() { return XLA_FFI_API_MINOR; }

// An activation of `count` numbers, a multiple of 64; false if there is none of that name.
extern "C" FEWBIT_EXPORT bool fewbit_activation(const char* name, const float* x, int64_t count,
                                                float* out) {
  fewbit::Elementwise activation;
  if (!fewbit::FindElementwise(name, std::strlen(name), &activation) || count % 64 != 0) {
    return false;
  }
  for (int64_t i = 0; i < count; i += 64) {
    fewbit::ChosenIsa().kernels->finish_row({x + i, 1.0f, nullptr, activation, out + i});
  }
  return true;
}
