// What to read and where it goes: the plan of one load, cut into windows that fit a slot.
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
  std::vector<uint32_t> checksums;  // CRC-32C of each block of kBlockBytes; none: nothing is checked
};

// Pieces of a file at equal distances go to memory at equal distances: the mirror image of Run (batch.h).
struct ReadRun {
  size_t file;
  uint64_t offset;       // in the file, of the first piece
  uint64_t piece_bytes;  // of each
  uint64_t pieces;
  uint64_t file_step;  // from piece to piece in the file; not less than piece_bytes
  uint64_t target;     // where the first piece goes
  uint64_t target_step;
  bool device;  // `target` is device memory

  uint64_t end() const { return offset + (pieces - 1) * file_step + piece_bytes; }
};

// Between two needed ranges of a file this much is read rather than left out: one long read costs less than
// two with a hole. The ranges are first rounded to whole blocks where blocks are checked, else to kAlignment,
// so a strided run whose pieces leave less than this between them is read through, and any other piece by
// piece.
constexpr uint64_t kReadGapBytes = uint64_t{1} << 20;

class ReadPlan {
 public:
  // One contiguous read and the runs that may have bytes in it. Begins at a multiple of kAlignment, and of
  // kBlockBytes if the file is checked.
  struct Window {
    size_t file;
    uint64_t begin, end;
    size_t first_run, end_run;
  };

  // Runs may be in any order, and may overlap in a file. `window_bytes` is a multiple of kBlockBytes. Throws
  // Failure for a run that leaves its file, and for checksums that are not one a block.
  ReadPlan(std::vector<ReadFile> files, std::vector<ReadRun> runs, uint64_t window_bytes);

  const std::vector<ReadFile>& files() const { return files_; }
  const std::vector<Window>& windows() const { return windows_; }  // by file and offset
  bool has_device_targets() const;

  // Calls copy(run, target, source, bytes, pieces) for all that runs need of the part [begin, end) of a
  // window, whose bytes are at `data`: `pieces` pieces of `bytes`, run.file_step apart from `source` on, go
  // to `target` and on, run.target_step apart. A border may cut a piece, so there are up to three calls a
  // run.
  template <typename Copy>
  void Deliver(const Window& window, uint64_t begin, uint64_t end, const uint8_t* data, Copy copy) const;

 private:
  void CutFile(size_t file, size_t first_run, size_t end_run, uint64_t window_bytes);

  std::vector<ReadFile> files_;  // all are constant after construction
  std::vector<ReadRun> runs_;    // by file and offset
  std::vector<Window> windows_;
};

template <typename Copy>
void ReadPlan::Deliver(const Window& window, uint64_t begin, uint64_t end, const uint8_t* data,
                       Copy copy) const {
  for (size_t i = window.first_run; i < window.end_run && runs_[i].offset < end; ++i) {
    const ReadRun& run = runs_[i];
    uint64_t piece = begin > run.offset ? (begin - run.offset) / run.file_step : 0;
    if (run.offset + piece * run.file_step + run.piece_bytes <= begin) ++piece;  // begin is in the gap behind
    while (piece < run.pieces) {
      const uint64_t at = run.offset + piece * run.file_step;
      if (at >= end) break;
      const uint64_t cut_off = begin > at ? begin - at : 0;
      const uint64_t bytes = std::min(run.piece_bytes - cut_off, end - at - cut_off);
      const uint64_t whole = bytes < run.piece_bytes ? 1 : (end - at - bytes) / run.file_step + 1;
      const uint64_t pieces = std::min(whole, run.pieces - piece);
      copy(run, run.target + piece * run.target_step + cut_off, data + (at + cut_off - begin), bytes, pieces);
      piece += pieces;
    }
  }
}

}  // namespace datastates
