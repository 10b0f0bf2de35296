// CRC-32C (Castagnoli), the checksum of every block of a data file.
#pragma once

#include <cstddef>
#include <cstdint>

namespace datastates {

// Returns the CRC of the data that `crc` covers followed by `bytes` more; start with 0. Uses the instruction
// of x86-64 (SSE 4.2) and arm64 where there is one, on three interleaved streams (after Gopal et al., "Fast
// CRC Computation for iSCSI Polynomial Using CRC32 Instruction", Intel 2011), and tables elsewhere.
uint32_t Crc32c(uint32_t crc, const void* data, size_t bytes);

// The same by tables alone: a reference for tests.
uint32_t Crc32cByTables(uint32_t crc, const void* data, size_t bytes);

// Copies `bytes` past the caches (engine/host_copy.h) and returns the CRC of what `crc` covers followed by
// the bytes that it has stored. Each is read from memory once: a copy and a checksum after it read them
// twice.
uint32_t CopyWithCrc32c(uint32_t crc, void* target, const void* source, size_t bytes);

// Returns the CRC of A followed by B, from the CRCs of both and the length of B.
uint32_t Crc32cCombine(uint32_t a, uint32_t b, uint64_t bytes_of_b);

}  // namespace datastates
