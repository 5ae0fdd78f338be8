#ifndef FEWBIT_NATIVE_EXPORTS_H_
#define FEWBIT_NATIVE_EXPORTS_H_

#include "xla/ffi/api/c_api.h"

// Everything else is hidden, so that two libraries in one process cannot mix their symbols.
#define FEWBIT_EXPORT __attribute__((visibility("default")))

// The FFI's defining macro has no place for an attribute; a declaration before it does.
#define FEWBIT_EXPORT_HANDLER(name) \
  extern "C" FEWBIT_EXPORT XLA_FFI_Error* name(XLA_FFI_CallFrame* call_frame)

#endif  // FEWBIT_NATIVE_EXPORTS_H_
