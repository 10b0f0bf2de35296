// Tests of what differs between processors, as a program without Python, so that an emulator can run it.
// Prints what fails, and returns 1 then.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <vector>

inline int failures = 0;

#define CHECK(condition, ...)                                                    \
  do {                                                                           \
    if (condition) break;                                                        \
    ++failures;                                                                  \
    std::fprintf(stderr, "%s:%d: not so: %s: ", __FILE__, __LINE__, #condition); \
    std::fprintf(stderr, __VA_ARGS__);                                           \
    std::fputc('\n', stderr);                                                    \
  } while (false)

// The same bytes at every call, by a linear congruential generator.
inline std::vector<uint8_t> SomeBytes(size_t size, uint64_t seed = 1) {
  std::vector<uint8_t> bytes(size);
  for (uint8_t& byte : bytes) {
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    byte = static_cast<uint8_t>(seed >> 56);
  }
  return bytes;
}

void TestBlockSums();
void TestCrc32c();
void TestHostCopy();
void TestSha256();
