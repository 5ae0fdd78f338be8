// What this library was built against and which kernels it runs here, for kernels.info().

#include "exports.h"
#include "isa.h"
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
