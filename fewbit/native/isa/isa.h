// Which instruction set's kernels this process runs.

#ifndef FEWBIT_NATIVE_ISA_H_
#define FEWBIT_NATIVE_ISA_H_

#include <string>

#include "matmul/kernels.h"

namespace fewbit {

struct Isa {
  const Kernels* kernels;  // the best this CPU has, or those that FEWBIT_ISA names
  std::string problem;     // why FEWBIT_ISA cannot be followed; else empty
};

const Isa& ChosenIsa();

}  // namespace fewbit

#endif  // FEWBIT_NATIVE_ISA_H_
