// A data file while it is being written.
//
// Protocol of durability (the caller keeps the order):
//   1. Create: missing directories are made; O_EXCL, so nothing is ever overwritten.
//   2. Reserve: space is reserved before the first write, so a full disk is found here.
//   3. WriteAt: aligned data, then the footer; direct I/O where the file system accepts it.
//   4. Truncate to the final size, Sync the file, Sync every directory that was made and the one that
//      holds the file. Only then may the file be reported as durable.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "common.h"
#include "os/faults.h"
#include "os/fork.h"

namespace datastates {

class DataFile {
 public:
  // Throws Failure. `direct`: try O_DIRECT and fall back to buffered writes where it is refused, at
  // open or at the first write. `discard`: write nothing, to measure copies without a disk. `faults` must
  // outlive the file.
  DataFile(const std::string& path, bool direct, bool discard, Faults* faults);
  ~DataFile();  // closes; Sync has reported any error, or the file is being abandoned
  DataFile(const DataFile&) = delete;
  DataFile& operator=(const DataFile&) = delete;

  void Reserve(uint64_t bytes);  // does nothing with `discard`
  // `data`, `bytes` and `offset` are multiples of kAlignment. Thread-safe. Short writes are resumed.
  void WriteAt(const uint8_t* data, uint64_t bytes, uint64_t offset);
  void Truncate(uint64_t bytes);
  void Sync();

  // Whether the name is still this file's: another program may have removed it, and made another one.
  bool IsAtItsName() const;
  bool direct() const { return direct_; }
  bool discards() const { return discard_; }

 private:
  void MakeDirectories();
  int Open(int flags);  // returns an errno, or 0
  void SyncDirectory(const std::string& directory);
  [[noreturn]] void Throw(const char* operation, int code) const;
  template <typename Call>
  int Attempt(const char* operation, Call call);  // returns an errno, injected or what `call` returns, or 0

  const HomeProcess home_;
  const std::string path_;
  const bool discard_;
  Faults* const faults_;
  std::vector<std::string> directories_;  // to be synced; constant after construction
  int fd_ = -1;                           // constant after construction
  std::atomic<bool> direct_;
};

}  // namespace datastates
