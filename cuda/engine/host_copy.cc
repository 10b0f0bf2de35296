#include "engine/host_copy.h"

#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace datastates {
namespace {

// With a constant size each copy is one load and one store; most rows are single elements.
template <size_t kBytes>
void CopyElements(uint8_t* target, size_t target_step, const uint8_t* source, size_t source_step,
                  size_t rows) {
  for (size_t i = 0; i < rows; ++i) {
    std::memcpy(target + i * target_step, source + i * source_step, kBytes);
  }
}

#if defined(__x86_64__)
constexpr size_t kCacheLine = 64;

void CopyPastCaches(uint8_t* target, const uint8_t* source, size_t bytes) {
  const size_t head = (kCacheLine - reinterpret_cast<uintptr_t>(target) % kCacheLine) % kCacheLine;
  std::memcpy(target, source, head);
  size_t at = head;
  for (; at + kCacheLine <= bytes; at += kCacheLine) {
    for (size_t word = at; word < at + kCacheLine; word += sizeof(__m128i)) {
      _mm_stream_si128(reinterpret_cast<__m128i*>(target + word),
                       _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + word)));
    }
  }
  std::memcpy(target + at, source + at, bytes - at);
  _mm_sfence();  // the lock that hands the slot to another thread does not order these stores
}
#else
void CopyPastCaches(uint8_t* target, const uint8_t* source, size_t bytes) {
  std::memcpy(target, source, bytes);
}
#endif

}  // namespace

void CopyRows(uint8_t* target, size_t target_step, const uint8_t* source, size_t source_step,
              size_t row_bytes, size_t rows) {
  switch (row_bytes) {
    case 1:
      return CopyElements<1>(target, target_step, source, source_step, rows);
    case 2:
      return CopyElements<2>(target, target_step, source, source_step, rows);
    case 4:
      return CopyElements<4>(target, target_step, source, source_step, rows);
    case 8:
      return CopyElements<8>(target, target_step, source, source_step, rows);
    default:
      for (size_t i = 0; i < rows; ++i) {
        uint8_t* const to = target + i * target_step;
        const uint8_t* const from = source + i * source_step;
        row_bytes < kLongBytes ? static_cast<void>(std::memcpy(to, from, row_bytes))
                               : CopyPastCaches(to, from, row_bytes);
      }
  }
}

}  // namespace datastates
