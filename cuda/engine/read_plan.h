// The plan of one load: which spans of which files go to which addresses, cut into windows that fit a slot.
// Pure planning: files are read by engine/reader.h.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "common.h"

namespace datastates {

struct ReadFile {
  std::string path;
  uint64_t data_bytes;
  std::vector<uint32_t> checksums;  // CRC-32C of each block of kBlockBytes; empty: nothing is checked
  bool through_cache = false;       // not by direct I/O: other processes of this machine read the same bytes
};

// Rows at equal distances in a file go to memory at equal distances: the mirror image of Span (span.h).
struct ReadSpan {
  size_t file;
  uint64_t offset;     // in the file, of the first row
  uint64_t row_bytes;  // of each
  uint64_t rows;
  uint64_t file_step;  // from row to row in the file; not less than row_bytes
  uint64_t target;     // where the first row goes
  uint64_t target_step;
  bool device;  // `target` is device memory

  uint64_t end() const { return offset + (rows - 1) * file_step + row_bytes; }
};

// The longest hole that is read and discarded rather than skipped. Each span is first rounded outwards to
// what can be read: whole blocks where blocks are checked, else multiples of kAlignment. So rows that are
// this close are read as one range and others row by row, and no checked block is read unless some of it is
// needed. On a local disk of 3 GB/s a read costs four threads 10 microseconds: holes of 8 to 16 KiB take the
// same time either way, and reading a hole of 64 KiB takes up to four times as long as skipping it. A disk
// with a higher latency would gain from a higher limit.
constexpr uint64_t kReadGapBytes = uint64_t{32} << 10;

class ReadPlan {
 public:
  // One contiguous read and the spans that may have bytes in it. Begins at a multiple of kAlignment, and of
  // kBlockBytes if the file is checked.
  struct Window {
    size_t file;
    uint64_t begin, end;
    size_t first_span, end_span;
  };

  // Spans may be in any order, and may overlap in a file. `window_bytes` is a multiple of kBlockBytes. Throws
  // Failure for a span that leaves its file, and unless there is one checksum per block.
  ReadPlan(std::vector<ReadFile> files, std::vector<ReadSpan> spans, uint64_t window_bytes);

  const std::vector<ReadFile>& files() const { return files_; }
  const std::vector<Window>& windows() const { return windows_; }  // by file and offset
  bool has_device_targets() const;

  // Calls copy(span, target, source, bytes, rows) for all that spans need of the part [begin, end) of a
  // window, whose bytes are at `data`: `rows` of `bytes`, span.file_step apart from `source` on, go
  // to `target` and on, span.target_step apart. A border may cut a row, so there are up to three calls a
  // span.
  template <typename Copy>
  void Deliver(const Window& window, uint64_t begin, uint64_t end, const uint8_t* data, Copy copy) const;

 private:
  void CutFile(size_t file, size_t first_span, size_t end_span, uint64_t window_bytes);

  std::vector<ReadFile> files_;  // all are constant after construction
  std::vector<ReadSpan> spans_;  // by file and offset
  std::vector<Window> windows_;
};

template <typename Copy>
void ReadPlan::Deliver(const Window& window, uint64_t begin, uint64_t end, const uint8_t* data,
                       Copy copy) const {
  for (size_t i = window.first_span; i < window.end_span && spans_[i].offset < end; ++i) {
    const ReadSpan& span = spans_[i];
    uint64_t row = begin > span.offset ? (begin - span.offset) / span.file_step : 0;
    if (span.offset + row * span.file_step + span.row_bytes <= begin) ++row;  // begin is in the gap after it
    while (row < span.rows) {
      const uint64_t at = span.offset + row * span.file_step;
      if (at >= end) break;
      const uint64_t cut_off = begin > at ? begin - at : 0;
      const uint64_t bytes = std::min(span.row_bytes - cut_off, end - at - cut_off);
      const uint64_t whole = bytes < span.row_bytes ? 1 : (end - at - bytes) / span.file_step + 1;
      const uint64_t rows = std::min(whole, span.rows - row);
      copy(span, span.target + row * span.target_step + cut_off, data + (at + cut_off - begin), bytes, rows);
      row += rows;
    }
  }
}

}  // namespace datastates
