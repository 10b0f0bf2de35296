// SHA-256 (FIPS 180-4), for the digests of blocks. Digests of blocks that a save stages show whether the data
// file of an earlier save still holds the same bytes (FORMAT.md, content digest).
//
// Not a library's: it runs on the engine's threads, without Python, and one binary has to load on every
// machine. OpenSSL's shared library has another name and ABI on each distribution, and linked statically it
// would be a hundred times as much code as this.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace datastates {

constexpr size_t kSha256Bytes = 32;
using Sha256Digest = std::array<uint8_t, kSha256Bytes>;

// Returns the SHA-256 of the data. Uses the SHA instructions of x86-64 where the processor has them.
Sha256Digest Sha256(const void* data, size_t bytes);

// The same in portable C++: a reference for tests, and what other processors run.
Sha256Digest Sha256Portable(const void* data, size_t bytes);

}  // namespace datastates
