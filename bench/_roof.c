/* What the machine itself can do: bytes read per second, multiply-adds per second from registers.
 * Compiled and called by _roof.py; each function is one thread's share. Loops are written in
 * assembly because a compiler drops sums that nobody reads, or moves them through memory. The two
 * sources of a product differ: some CPUs run `op x, x, sum` at half rate. */

#include <stdint.h>

void roof_read(const char* bytes, int64_t count) {
  const char* end = bytes + count / 128 * 128;
  __asm__ volatile(
      "1:\n\t"
      "vpor (%0), %%ymm0, %%ymm0\n\t"
      "vpor 32(%0), %%ymm1, %%ymm1\n\t"
      "vpor 64(%0), %%ymm2, %%ymm2\n\t"
      "vpor 96(%0), %%ymm3, %%ymm3\n\t"
      "add $128, %0\n\t"
      "cmp %1, %0\n\t"
      "jne 1b\n\t"
      "vzeroupper"
      : "+r"(bytes)
      : "r"(end)
      : "xmm0", "xmm1", "xmm2", "xmm3", "memory", "cc");
}

#define LOOP(body)                                                                        \
  __asm__ volatile("vzeroall\n\t1:\n\t" body "dec %0\n\tjnz 1b\n\tvzeroupper"                         \
                   : "+r"(loops)                                                          \
                   :                                                                      \
                   : "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7",      \
                     "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15", "cc")

/* Twelve independent sums in registers 0 to 11: more than latency times issue rate needs. */
#define TWELVE(op, a, b, r)                                                               \
  op a b r "0\n\t" op a b r "1\n\t" op a b r "2\n\t" op a b r "3\n\t" op a b r "4\n\t"    \
  op a b r "5\n\t" op a b r "6\n\t" op a b r "7\n\t" op a b r "8\n\t" op a b r "9\n\t"    \
  op a b r "10\n\t" op a b r "11\n\t"

/* Six products into registers 0 to 5, added to the sums in 6 to 11, twice. */
#define PRODUCT(op, add, t, s)                                                            \
  op " %%ymm14, %%ymm15, %%ymm" t "\n\t" add " %%ymm" t ", %%ymm" s ", %%ymm" s "\n\t"
#define SIX(op, add)                                                                      \
  PRODUCT(op, add, "0", "6") PRODUCT(op, add, "1", "7") PRODUCT(op, add, "2", "8")        \
  PRODUCT(op, add, "3", "9") PRODUCT(op, add, "4", "10") PRODUCT(op, add, "5", "11")

void roof_f32_avx2(int64_t loops) {
  LOOP(TWELVE("vfmadd231ps ", "%%ymm14, ", "%%ymm15, ", "%%ymm"));
}

/* int8 products that cannot saturate: both sides widened to int16, 16 products an instruction. */
void roof_int8_avx2(int64_t loops) {
  LOOP(SIX("vpmaddwd", "vpaddd") SIX("vpmaddwd", "vpaddd"));
}

/* Codes of 4 bits times int8: 32 products an instruction; a few of its int16 sums can be added
 * before they must be widened, which is left out here. */
void roof_int4_avx2(int64_t loops) {
  LOOP(SIX("vpmaddubsw", "vpaddw") SIX("vpmaddubsw", "vpaddw"));
}

void roof_f32_avx512(int64_t loops) {
  LOOP(TWELVE("vfmadd231ps ", "%%zmm14, ", "%%zmm15, ", "%%zmm"));
}

void roof_int8_avx512(int64_t loops) {
  LOOP(TWELVE("vpdpbusd ", "%%zmm14, ", "%%zmm15, ", "%%zmm"));
}

/* Two threads hand a line of memory to and fro, `loops` times each: a few tens of nanoseconds where
 * their cores share a cache, several times that where they do not. */
void roof_handover(int64_t* line, int64_t me, int64_t loops) {
  for (int64_t turn = me; turn < 2 * loops; turn += 2) {
    while (__atomic_load_n(line, __ATOMIC_ACQUIRE) != turn) {
    }
    __atomic_store_n(line, turn + 1, __ATOMIC_RELEASE);
  }
}
