// Reads pieces of one data file in parallel, checks the blocks they lie in, and puts them in place.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common.h"

namespace datastates {

// The file's bytes [offset, offset + bytes) go to host memory at `target`.
struct Piece {
  uint64_t offset;
  uint64_t bytes;
  uint64_t target;
};

struct ReadOptions {
  bool direct = true;
  int threads = 4;
  size_t buffer_bytes = size_t{8} << 20;  // per thread; a multiple of kBlockBytes
  std::string faults;
};

struct ReadResult {
  uint64_t bytes_read = 0;           // from the file, block padding included
  std::vector<uint64_t> bad_blocks;  // indexes of blocks whose checksum differs, ascending
  std::string error;                 // of the open or the first read that failed, with path and errno
};

// `pieces` may be in any order and must lie in [0, data_bytes). `checksums` has one CRC-32C a block of
// kBlockBytes of [0, data_bytes), or is empty: then nothing is checked. Whole blocks are read only where
// they are checked. Pieces in a bad block are not delivered. Throws Failure for pieces out of range.
ReadResult ReadPieces(const std::string& path, uint64_t data_bytes, std::vector<Piece> pieces,
                      const std::vector<uint32_t>& checksums, const ReadOptions& options);

}  // namespace datastates
