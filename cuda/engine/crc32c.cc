#include "engine/crc32c.h"

#include <algorithm>
#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#elif defined(__aarch64__) && defined(__linux__)
#if !defined(__clang__)
#include <arm_acle.h>
#endif
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace datastates {
namespace {

constexpr uint32_t kPolynomial = 0x82f63b78;  // reflected
constexpr size_t kStream = 1024;              // bytes of each of the three interleaved streams
constexpr size_t kLine = 64;
// Bytes that another core staged are in no near cache, and the hardware prefetcher does not follow three
// streams: prefetching this far ahead raised 7.5 GB/s to 13 (Xeon, family 6, model 207). It may reach past
// the end, which is harmless.
constexpr size_t kAhead = 6 * kStream;

using Matrix = std::array<uint32_t, 32>;  // a linear map on CRC registers, one column a bit

uint32_t Apply(const Matrix& map, uint32_t vector) {
  uint32_t sum = 0;
  for (size_t bit = 0; vector != 0; ++bit, vector >>= 1) {
    if (vector & 1) sum ^= map[bit];
  }
  return sum;
}

Matrix Squared(const Matrix& map) {
  Matrix square;
  for (size_t bit = 0; bit < 32; ++bit) square[bit] = Apply(map, map[bit]);
  return square;
}

// Returns the map that one zero bit applies to the register.
Matrix OneZeroBit() {
  Matrix map;
  map[0] = kPolynomial;
  for (size_t bit = 1; bit < 32; ++bit) map[bit] = uint32_t{1} << (bit - 1);
  return map;
}

// All tables are made when the module is loaded, not at first use: a process forked while another thread made
// one would wait for that thread for ever.

// The maps of 1, 2, 4, 8 and so on zero bytes.
const std::array<Matrix, 64> kPowers = [] {
  std::array<Matrix, 64> made;
  Matrix map = Squared(Squared(Squared(OneZeroBit())));  // eight bits
  for (Matrix& power : made) {
    power = map;
    map = Squared(map);
  }
  return made;
}();

// Returns the register after `bytes` zero bytes, by repeated squaring (as zlib's crc32_combine does).
uint32_t ShiftZeros(uint32_t crc, uint64_t bytes) {
  for (size_t i = 0; bytes != 0; ++i, bytes >>= 1) {
    if (bytes & 1) crc = Apply(kPowers[i], crc);
  }
  return crc;
}

// Tables for a fixed shift: four look-ups instead of 32 tests.
struct Shift {
  std::array<std::array<uint32_t, 256>, 4> table;
  explicit Shift(uint64_t bytes) {
    for (size_t byte = 0; byte < 4; ++byte) {
      for (uint32_t value = 0; value < 256; ++value)
        table[byte][value] = ShiftZeros(value << (8 * byte), bytes);
    }
  }
  uint32_t operator()(uint32_t crc) const {
    return table[0][crc & 255] ^ table[1][(crc >> 8) & 255] ^ table[2][(crc >> 16) & 255] ^
           table[3][crc >> 24];
  }
};

uint64_t LoadWord(const uint8_t* at) {
  uint64_t word;
  std::memcpy(&word, at, sizeof word);
  return word;
}

const std::array<std::array<uint32_t, 256>, 8> kTables = [] {
  std::array<std::array<uint32_t, 256>, 8> made{};
  for (uint32_t value = 0; value < 256; ++value) {
    uint32_t crc = value;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (crc & 1 ? kPolynomial : 0);
    made[0][value] = crc;
  }
  for (size_t row = 1; row < 8; ++row) {
    for (size_t value = 0; value < 256; ++value) {
      made[row][value] = (made[row - 1][value] >> 8) ^ made[0][made[row - 1][value] & 255];
    }
  }
  return made;
}();

uint32_t TableStep(uint32_t crc, const uint8_t* at, size_t bytes) {
  for (; bytes >= 8; bytes -= 8, at += 8) {
    const uint64_t word = LoadWord(at) ^ crc;
    crc = 0;
    for (size_t byte = 0; byte < 8; ++byte) crc ^= kTables[7 - byte][(word >> (8 * byte)) & 255];
  }
  for (; bytes > 0; --bytes, ++at) crc = (crc >> 8) ^ kTables[0][(crc ^ *at) & 255];
  return crc;
}

#if defined(__x86_64__)
#if defined(__clang__)  // to clang 15 and later, the instruction is no part of SSE 4.2
#define DATASTATES_CRC_TARGET __attribute__((target("sse4.2,crc32")))
#else
#define DATASTATES_CRC_TARGET __attribute__((target("sse4.2")))
#endif
DATASTATES_CRC_TARGET inline uint32_t Word(uint32_t crc, uint64_t word) {
  return static_cast<uint32_t>(_mm_crc32_u64(crc, word));
}
DATASTATES_CRC_TARGET inline uint32_t Byte(uint32_t crc, uint8_t byte) { return _mm_crc32_u8(crc, byte); }
bool HardwareHasCrc32() { return __builtin_cpu_supports("sse4.2"); }
inline void StorePastCaches(uint8_t* at, uint64_t word) {
  _mm_stream_si64(reinterpret_cast<long long*>(at), static_cast<long long>(word));
}
inline void EndStoresPastCaches() { _mm_sfence(); }  // as in host_copy.cc
#elif defined(__aarch64__) && defined(__linux__)
// Before version 16, clang's arm_acle.h declares these only if the whole file is built for the extension.
#if defined(__clang__)
#define DATASTATES_CRC_TARGET __attribute__((target("crc")))
#define __crc32cd __builtin_arm_crc32cd
#define __crc32cb __builtin_arm_crc32cb
#else
#define DATASTATES_CRC_TARGET __attribute__((target("+crc")))
#endif
DATASTATES_CRC_TARGET inline uint32_t Word(uint32_t crc, uint64_t word) { return __crc32cd(crc, word); }
DATASTATES_CRC_TARGET inline uint32_t Byte(uint32_t crc, uint8_t byte) { return __crc32cb(crc, byte); }
bool HardwareHasCrc32() { return getauxval(AT_HWCAP) & HWCAP_CRC32; }
inline void StorePastCaches(uint8_t* at, uint64_t word) { std::memcpy(at, &word, sizeof word); }
inline void EndStoresPastCaches() {}
#endif

#if defined(DATASTATES_CRC_TARGET)
const bool kHasCrc32 = HardwareHasCrc32();
const Shift kOneStream(kStream), kTwoStreams(2 * kStream);

// The instruction has a latency of three cycles and a throughput of one: three streams keep it busy.
// With kCopies, stores what it has loaded at `to`, past the caches, and leaves nothing in them.
template <bool kCopies>
DATASTATES_CRC_TARGET uint32_t HardwareStep(uint32_t crc, const uint8_t* at, size_t bytes, uint8_t* to) {
  for (; bytes >= 3 * kStream; bytes -= 3 * kStream, at += 3 * kStream) {
    uint32_t b = 0, c = 0;
    for (size_t i = 0; i < kStream; i += 8) {
      if (i % kLine == 0) {
        for (size_t line = 0; line < 3; ++line) {
          __builtin_prefetch(at + kAhead + 3 * i + line * kLine, 0, kCopies ? 0 : 3);
        }
      }
      const uint64_t words[] = {LoadWord(at + i), LoadWord(at + kStream + i), LoadWord(at + 2 * kStream + i)};
      crc = Word(crc, words[0]);
      b = Word(b, words[1]);
      c = Word(c, words[2]);
      if (kCopies) {
        for (size_t stream = 0; stream < 3; ++stream)
          StorePastCaches(to + stream * kStream + i, words[stream]);
      }
    }
    crc = kTwoStreams(crc) ^ kOneStream(b) ^ c;
    if (kCopies) to += 3 * kStream;
  }
  if (kCopies) {
    EndStoresPastCaches();
    std::memcpy(to, at, bytes);
    at = to;
  }
  for (; bytes >= 8; bytes -= 8, at += 8) crc = Word(crc, LoadWord(at));
  for (; bytes > 0; --bytes, ++at) crc = Byte(crc, *at);
  return crc;
}
#endif

}  // namespace

uint32_t Crc32c(uint32_t crc, const void* data, size_t bytes) {
  const auto* at = static_cast<const uint8_t*>(data);
#if defined(DATASTATES_CRC_TARGET)
  if (kHasCrc32) return ~HardwareStep<false>(~crc, at, bytes, nullptr);
#endif
  return ~TableStep(~crc, at, bytes);
}

uint32_t CopyWithCrc32c(uint32_t crc, void* target, const void* source, size_t bytes) {
  auto* to = static_cast<uint8_t*>(target);
  const auto* at = static_cast<const uint8_t*>(source);
#if defined(DATASTATES_CRC_TARGET)
  if (kHasCrc32) {
    // Whole lines from here on: a line in pieces would be read before it is written.
    const size_t head = std::min(bytes, (kLine - reinterpret_cast<uintptr_t>(to) % kLine) % kLine);
    std::memcpy(to, at, head);
    crc = Crc32c(crc, to, head);
    return ~HardwareStep<true>(~crc, at + head, bytes - head, to + head);
  }
#endif
  std::memcpy(to, at, bytes);
  return Crc32c(crc, to, bytes);
}

uint32_t Crc32cByTables(uint32_t crc, const void* data, size_t bytes) {
  return ~TableStep(~crc, static_cast<const uint8_t*>(data), bytes);
}

uint32_t Crc32cCombine(uint32_t a, uint32_t b, uint64_t bytes_of_b) { return ShiftZeros(a, bytes_of_b) ^ b; }

}  // namespace datastates
