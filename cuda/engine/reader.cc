#include "engine/reader.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <system_error>
#include <thread>

#include "engine/crc32c.h"
#include "engine/save_job.h"  // kBlockBytes
#include "os/aligned.h"
#include "os/faults.h"
#include "os/fork.h"

namespace datastates {
namespace {

// One contiguous read and the pieces that begin in it or reach into it.
struct Task {
  uint64_t begin, end;
  size_t first_piece, end_piece;
};

class Descriptor {
 public:
  Descriptor(const std::string& path, bool direct) : direct_(direct) {
    if (direct) fd_ = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT);
    if (fd_ < 0) {
      direct_ = false;
      fd_ = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    }
    if (fd_ < 0) throw Failure("open", path, errno);
    CloseInForkedChild(fd_);
  }
  ~Descriptor() {
    ForgetDescriptor(fd_);
    close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;

  int fd() const { return fd_; }
  void StopDirect() {
    fcntl(fd_, F_SETFL, fcntl(fd_, F_GETFL) & ~O_DIRECT);
    direct_ = false;
  }
  bool direct() const { return direct_; }

 private:
  int fd_ = -1;
  std::atomic<bool> direct_;
};

void CheckRange(const std::vector<Piece>& pieces, uint64_t data_bytes) {
  for (const Piece& piece : pieces) {
    if (piece.bytes > data_bytes || piece.offset > data_bytes - piece.bytes) {
      throw Failure("plan reads", "", 0,
                    "piece of " + std::to_string(piece.bytes) + " bytes at offset " +
                        std::to_string(piece.offset) + " leaves the " + std::to_string(data_bytes) +
                        " bytes of data");
    }
  }
}

// The union of the pieces (ordered by offset), rounded to multiples of `unit`, in reads of at most `most`.
std::vector<Task> MergeRanges(const std::vector<Piece>& pieces, uint64_t unit, uint64_t most,
                              uint64_t data_bytes) {
  std::vector<Task> tasks;
  uint64_t covered = 0;
  for (const Piece& piece : pieces) {
    const uint64_t end = std::min(AlignUp(piece.offset + piece.bytes, unit), data_bytes);
    for (uint64_t at = std::max(piece.offset / unit * unit, covered); at < end; at = covered) {
      const bool extends = !tasks.empty() && tasks.back().end == at && at - tasks.back().begin < most;
      if (!extends) tasks.push_back({at, at, 0, 0});
      covered = tasks.back().end = std::min(end, tasks.back().begin + most);
    }
  }
  return tasks;
}

// Gives every read the window of pieces that can overlap it.
void AssignPieces(const std::vector<Piece>& pieces, std::vector<Task>* tasks) {
  std::vector<uint64_t> reach;  // the furthest end of the pieces up to here: ascending
  for (const Piece& piece : pieces) {
    reach.push_back(std::max(reach.empty() ? 0 : reach.back(), piece.offset + piece.bytes));
  }
  for (Task& task : *tasks) {
    task.first_piece =
        static_cast<size_t>(std::upper_bound(reach.begin(), reach.end(), task.begin) - reach.begin());
    const auto behind = std::lower_bound(pieces.begin(), pieces.end(), task.end,
                                         [](const Piece& piece, uint64_t end) { return piece.offset < end; });
    task.end_piece = static_cast<size_t>(behind - pieces.begin());
  }
}

class Reading {
 public:
  Reading(const std::string& path, uint64_t data_bytes, const std::vector<Piece>& pieces,
          const std::vector<uint32_t>& checksums, const std::vector<Task>& tasks, const ReadOptions& options)
      : path_(path),
        data_bytes_(data_bytes),
        pieces_(pieces),
        checksums_(checksums),
        tasks_(tasks),
        buffer_bytes_(options.buffer_bytes),
        file_(path, options.direct),
        faults_(options.faults) {}

  ReadResult Run(int threads) {
    std::vector<std::thread> helpers;
    const size_t wanted = std::min<size_t>(static_cast<size_t>(std::max(threads, 1)), tasks_.size());
    try {
      for (size_t i = 1; i < wanted; ++i) helpers.emplace_back(&Reading::Work, this);
    } catch (const std::system_error&) {
      // No more threads to be had: those that there are do the work.
    }
    if (wanted > 0) Work();
    for (std::thread& helper : helpers) helper.join();
    std::sort(result_.bad_blocks.begin(), result_.bad_blocks.end());
    return std::move(result_);
  }

 private:
  void Work() {
    try {
      PrivateMapping buffer(buffer_bytes_);
      for (size_t i = next_++; i < tasks_.size() && !failed_; i = next_++) Serve(tasks_[i], buffer.data());
    } catch (const std::exception& error) {
      std::lock_guard<std::mutex> lock(mutex_);
      if (result_.error.empty()) result_.error = error.what();
      failed_ = true;
    }
  }

  void Serve(const Task& task, uint8_t* buffer) {
    Fetch(task.begin, task.end, buffer);
    const std::vector<uint64_t> bad = BadBlocks(task, buffer);
    for (size_t i = task.first_piece; i < task.end_piece; ++i) {
      const Piece& piece = pieces_[i];
      const uint64_t from = std::max(piece.offset, task.begin);
      const uint64_t to = std::min(piece.offset + piece.bytes, task.end);
      if (from >= to || !bad.empty()) continue;
      std::memcpy(reinterpret_cast<void*>(piece.target + (from - piece.offset)), buffer + (from - task.begin),
                  to - from);
    }
    std::lock_guard<std::mutex> lock(mutex_);
    result_.bytes_read += task.end - task.begin;
    result_.bad_blocks.insert(result_.bad_blocks.end(), bad.begin(), bad.end());
  }

  void Fetch(uint64_t begin, uint64_t end, uint8_t* buffer) {
    for (uint64_t at = begin; at < end;) {
      const bool direct = file_.direct();  // of this call: another thread may meet the same refusal first
      const Faults::Effect effect = faults_.Count("read");
      // A direct read ends at a multiple of kAlignment. Behind a short read that did not, only a buffered
      // one goes on, and not a byte too far: the buffer ends with the task.
      uint64_t wanted = direct ? AlignUp(end - at, kAlignment) : end - at;
      if (effect.short_count) wanted = direct ? AlignUp(wanted / 2, kAlignment) : wanted / 2 | 1;
      errno = effect.error;
      const ssize_t got =
          effect.error ? -1 : pread(file_.fd(), buffer + (at - begin), wanted, static_cast<off_t>(at));
      if (got < 0 && errno == EINTR) continue;
      if (got < 0 && errno == EINVAL && direct) {
        file_.StopDirect();
        continue;
      }
      const std::string where = "at offset " + std::to_string(at);
      if (got < 0) throw Failure("read", path_, errno, where);
      if (got == 0)
        throw Failure("read", path_, 0,
                      "the file ends " + where + ", before its data does: it was truncated");
      if (static_cast<uint64_t>(got) % kAlignment != 0) file_.StopDirect();
      at += static_cast<uint64_t>(got);
    }
  }

  std::vector<uint64_t> BadBlocks(const Task& task, const uint8_t* buffer) const {
    std::vector<uint64_t> bad;
    if (checksums_.empty()) return bad;
    for (uint64_t at = task.begin; at < task.end; at += kBlockBytes) {
      const uint64_t bytes = std::min(kBlockBytes, data_bytes_ - at);
      const uint64_t block = at / kBlockBytes;
      if (Crc32c(0, buffer + (at - task.begin), bytes) != checksums_[block]) bad.push_back(block);
    }
    return bad;
  }

  const std::string& path_;
  const uint64_t data_bytes_;
  const std::vector<Piece>& pieces_;
  const std::vector<uint32_t>& checksums_;
  const std::vector<Task>& tasks_;
  const size_t buffer_bytes_;
  Descriptor file_;
  Faults faults_;
  std::atomic<size_t> next_{0};
  std::atomic<bool> failed_{false};
  std::mutex mutex_;
  ReadResult result_ GUARDED_BY(mutex_);
};

}  // namespace

ReadResult ReadPieces(const std::string& path, uint64_t data_bytes, std::vector<Piece> pieces,
                      const std::vector<uint32_t>& checksums, const ReadOptions& options) {
  CheckRange(pieces, data_bytes);
  if (!checksums.empty() && checksums.size() != AlignUp(data_bytes, kBlockBytes) / kBlockBytes) {
    throw Failure("plan reads", path, 0, "the number of checksums does not fit the file");
  }
  if (options.buffer_bytes == 0 || options.buffer_bytes % kBlockBytes != 0) {
    throw Failure("plan reads", path, 0, "the buffer must be a multiple of 1 MiB");
  }
  pieces.erase(
      std::remove_if(pieces.begin(), pieces.end(), [](const Piece& piece) { return piece.bytes == 0; }),
      pieces.end());
  std::sort(pieces.begin(), pieces.end(), [](const Piece& a, const Piece& b) { return a.offset < b.offset; });
  const uint64_t unit = checksums.empty() ? kAlignment : kBlockBytes;
  std::vector<Task> tasks = MergeRanges(pieces, unit, options.buffer_bytes, data_bytes);
  AssignPieces(pieces, &tasks);
  try {
    return Reading(path, data_bytes, pieces, checksums, tasks, options).Run(options.threads);
  } catch (const Failure& failure) {  // the file does not open
    ReadResult result;
    result.error = failure.what();
    return result;
  }
}

}  // namespace datastates
