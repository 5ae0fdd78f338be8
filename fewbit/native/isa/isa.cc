#include "isa/isa.h"

#include <cstdlib>

namespace fewbit {
namespace {

struct Candidate {
  const Kernels* kernels;
  bool supported;
};

Isa Choose() {
  // The builtin asks the operating system too.
  const Candidate candidates[] = {
#if defined(__x86_64__)
      {&kAvx512VnniKernels,
       __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni")},
      {&kAvx2Kernels, __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                          __builtin_cpu_supports("f16c")},
#endif
      {&kPortableKernels, true},
  };
  const char* forced = std::getenv("FEWBIT_ISA");
  const std::string wanted = forced == nullptr ? "" : forced;
  Isa best{nullptr, ""};
  std::string known, can;
  for (const Candidate& candidate : candidates) {
    const std::string name = candidate.kernels->name;
    known += (known.empty() ? "" : ", ") + name;
    if (!candidate.supported) {
      if (name == wanted) {
        best.problem = "FEWBIT_ISA asks for " + name + ", which this CPU does not have";
      }
      continue;
    }
    can += (can.empty() ? "" : ", ") + name;
    if (best.kernels == nullptr || name == wanted) {
      best.kernels = candidate.kernels;
    }
  }
  if (!wanted.empty() && wanted != best.kernels->name) {
    if (best.problem.empty()) {
      best.problem = "FEWBIT_ISA is '" + wanted + "', which is no instruction set that fewbit knows (" +
                     known + ")";
    }
    best.problem += "; use one of those that this CPU has (" + can + "), or unset it";
  }
  return best;
}

}  // namespace

const Isa& ChosenIsa() {
  static const Isa chosen = Choose();
  return chosen;
}

}  // namespace fewbit
