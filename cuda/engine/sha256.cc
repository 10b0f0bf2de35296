#include "engine/sha256.h"

#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace datastates {
namespace {

constexpr size_t kStepBytes = 64;

using State = std::array<uint32_t, 8>;
using Rounds = void (*)(State* state, const uint8_t* at, size_t steps);

// The first 32 bits of the fractional parts of the square roots of the first 8 primes.
constexpr State kInitial = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                            0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

// And those of the cube roots of the first 64.
alignas(16) constexpr uint32_t kRound[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

uint32_t Rotated(uint32_t word, int bits) { return (word >> bits) | (word << (32 - bits)); }

uint32_t LoadBigEndian(const uint8_t* at) {
  return uint32_t{at[0]} << 24 | uint32_t{at[1]} << 16 | uint32_t{at[2]} << 8 | uint32_t{at[3]};
}

void StoreBigEndian(uint64_t value, size_t bytes, uint8_t* at) {
  for (size_t i = 0; i < bytes; ++i) at[i] = static_cast<uint8_t>(value >> (8 * (bytes - 1 - i)));
}

void PortableRounds(State* state, const uint8_t* at, size_t steps) {
  for (; steps > 0; --steps, at += kStepBytes) {
    uint32_t w[64];
    for (int i = 0; i < 16; ++i) w[i] = LoadBigEndian(at + 4 * i);
    for (int i = 16; i < 64; ++i) {
      const uint32_t a = w[i - 15], b = w[i - 2];
      w[i] = w[i - 16] + (Rotated(a, 7) ^ Rotated(a, 18) ^ (a >> 3)) + w[i - 7] +
             (Rotated(b, 17) ^ Rotated(b, 19) ^ (b >> 10));
    }
    auto [a, b, c, d, e, f, g, h] = *state;
    for (int i = 0; i < 64; ++i) {
      const uint32_t sum1 = Rotated(e, 6) ^ Rotated(e, 11) ^ Rotated(e, 25);
      const uint32_t t1 = h + sum1 + ((e & f) ^ (~e & g)) + kRound[i] + w[i];
      const uint32_t sum0 = Rotated(a, 2) ^ Rotated(a, 13) ^ Rotated(a, 22);
      const uint32_t t2 = sum0 + ((a & b) ^ (a & c) ^ (b & c));
      h = g, g = f, f = e, e = d + t1, d = c, c = b, b = a, a = t1 + t2;
    }
    const State added = {a, b, c, d, e, f, g, h};
    for (size_t i = 0; i < 8; ++i) (*state)[i] += added[i];
  }
}

#if defined(__x86_64__)
#define DATASTATES_SHA_TARGET __attribute__((target("sha,ssse3,sse4.1")))

bool HardwareHasSha256() {
  uint32_t a = 0, b = 0, c = 0, d = 0;  // gcc 12 and clang 14 have no name for it in __builtin_cpu_supports
  const bool sha = __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (b & bit_SHA) != 0;
  return sha && __builtin_cpu_supports("ssse3") && __builtin_cpu_supports("sse4.1");
}

const bool kHasSha256 = HardwareHasSha256();  // found when the module is loaded, as in crc32c.cc

// After Gulley et al., "Intel SHA Extensions" (2013): the state is kept as the words ABEF and CDGH, four
// rounds take two instructions, and the message schedule of rounds 16 and later runs beside them.
DATASTATES_SHA_TARGET void HardwareRounds(State* state, const uint8_t* at, size_t steps) {
  const __m128i swap = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
  __m128i low = _mm_loadu_si128(reinterpret_cast<const __m128i*>(state->data()));       // DCBA
  __m128i high = _mm_loadu_si128(reinterpret_cast<const __m128i*>(state->data() + 4));  // HGFE
  low = _mm_shuffle_epi32(low, 0xb1);                                                   // CDAB
  high = _mm_shuffle_epi32(high, 0x1b);                                                 // EFGH
  __m128i abef = _mm_alignr_epi8(low, high, 8), cdgh = _mm_blend_epi16(high, low, 0xf0);
  for (; steps > 0; --steps, at += kStepBytes) {
    const __m128i abef_before = abef, cdgh_before = cdgh;
    __m128i w[4];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      __m128i& now = w[i % 4];
      if (i < 4) {
        now = _mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at) + i), swap);
      } else {
        const __m128i before = w[(i + 3) % 4];
        const __m128i middle = _mm_alignr_epi8(before, w[(i + 2) % 4], 4);
        now = _mm_add_epi32(_mm_sha256msg1_epu32(now, w[(i + 1) % 4]), middle);
        now = _mm_sha256msg2_epu32(now, before);
      }
      const __m128i sum = _mm_add_epi32(now, _mm_load_si128(reinterpret_cast<const __m128i*>(kRound) + i));
      cdgh = _mm_sha256rnds2_epu32(cdgh, abef, sum);
      abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(sum, 0x0e));
    }
    abef = _mm_add_epi32(abef, abef_before);
    cdgh = _mm_add_epi32(cdgh, cdgh_before);
  }
  low = _mm_shuffle_epi32(abef, 0x1b);   // FEBA
  high = _mm_shuffle_epi32(cdgh, 0xb1);  // DCHG
  _mm_storeu_si128(reinterpret_cast<__m128i*>(state->data()), _mm_blend_epi16(low, high, 0xf0));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(state->data() + 4), _mm_alignr_epi8(high, low, 8));
}
#endif

Sha256Digest Digest(Rounds rounds, const uint8_t* data, size_t bytes) {
  State state = kInitial;
  const size_t whole = bytes / kStepBytes, left = bytes % kStepBytes;
  rounds(&state, data, whole);
  // The rest, a bit that is set, zeros, and the number of bits.
  uint8_t end[2 * kStepBytes] = {};
  if (left > 0) std::memcpy(end, data + whole * kStepBytes, left);
  end[left] = 0x80;
  const size_t steps = left + 1 + sizeof(uint64_t) > kStepBytes ? 2 : 1;
  StoreBigEndian(uint64_t{bytes} * 8, sizeof(uint64_t), end + steps * kStepBytes - sizeof(uint64_t));
  rounds(&state, end, steps);
  Sha256Digest digest;
  for (size_t i = 0; i < state.size(); ++i) StoreBigEndian(state[i], 4, digest.data() + 4 * i);
  return digest;
}

}  // namespace

Sha256Digest Sha256(const void* data, size_t bytes) {
  const auto* at = static_cast<const uint8_t*>(data);
#if defined(__x86_64__)
  if (kHasSha256) return Digest(HardwareRounds, at, bytes);
#endif
  return Digest(PortableRounds, at, bytes);
}

Sha256Digest Sha256Portable(const void* data, size_t bytes) {
  return Digest(PortableRounds, static_cast<const uint8_t*>(data), bytes);
}

}  // namespace datastates
