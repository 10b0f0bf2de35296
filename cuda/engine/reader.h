// The threads that execute a load. Each takes the next window of the plan, reads it into a slot, verifies its
// blocks, and copies the bytes of the spans to their targets. A slot that a device is still copying from
// stays with its thread.
//
// No deadlock: a thread that holds a slot never waits for another one. A file is opened when a thread reaches
// its first window and closed when the last thread leaves it, so no more files are open than there are
// threads.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "device/copier.h"
#include "engine/read_plan.h"
#include "os/input_file.h"
#include "os/mutex.h"
#include "staging/pool.h"

namespace datastates {

// The options and the memory of reads, shared by any number of jobs: one slot per thread, or two if targets
// are on a device, so that one is read into while the device copies from the other. Page-locked from the
// first device target on.
class Reader {
 public:
  // The bindings pass every value; defaults are theirs and config.py's.
  struct Options {
    bool direct;
    int threads;
    size_t slot_bytes;  // the longest read; a multiple of kBlockBytes
    std::string driver;
    std::string faults;
    std::string sysfs;  // os/numa.h
  };

  // Throws Failure for invalid options. Takes no memory yet.
  explicit Reader(const Options& options);

  const Options& options() const { return options_; }
  SlotPool& pool() { return pool_; }
  Faults* faults() { return &faults_; }

 private:
  const Options options_;
  Faults faults_;
  SlotPool pool_;
};

class ReadJob {
 public:
  struct BadBlock {
    size_t file;
    uint64_t block;
  };
  struct Result {
    uint64_t bytes_read = 0;           // from files, padding of blocks included
    std::vector<BadBlock> bad_blocks;  // all of them, by file and block; none of their bytes was delivered
    std::optional<Failure> failure;    // the first; it ends the job
  };

  // Starts the threads and returns. Device targets need `trainer`, the stream that last used them, and the
  // calling thread's CUDA context. Throws Failure if there is no memory, no driver or not one thread. Waits
  // for memory up to a second: if there is none later, the job fails.
  ReadJob(std::shared_ptr<Reader> reader, ReadPlan plan, CuStream trainer);
  ~ReadJob() { Close(); }
  ReadJob(const ReadJob&) = delete;
  ReadJob& operator=(const ReadJob&) = delete;

  // Returns whether the job ended within that time: everything is delivered, on devices too, or it failed.
  bool Wait(double seconds);
  // Abandons what is not delivered and joins every thread. No target is written to afterwards, as far as the
  // driver lets this know (DeviceCopier::Drain).
  void Close();
  Result result() const;  // so far

 private:
  // A file; open while some thread reads it.
  struct Source {
    Mutex mutex;
    std::weak_ptr<InputFile> open GUARDED_BY(mutex);
  };
  // The last file that a thread has read from.
  struct Opened {
    size_t number;
    std::shared_ptr<InputFile> file;
  };
  struct Lent {
    Slot slot;
    std::optional<DeviceCopier::Place> copied;  // empty: no device copies from the slot
  };

  void Work();
  void ReadWindows();
  void Open(size_t file, Opened* opened);
  bool TakeSlot(std::deque<Lent>* lent);
  bool Check(const ReadPlan::Window& window, uint64_t begin, uint64_t end, const uint8_t* data);
  bool Deliver(const ReadPlan::Window& window, const uint8_t* data);
  void Fail(const std::exception& error) noexcept;

  std::shared_ptr<Reader> reader_;  // constant until Close
  const ReadPlan plan_;
  std::shared_ptr<DeviceCopier> copier_;  // constant after construction
  NumaNode node_;                         // the copier's device's; likewise
  std::unique_ptr<Source[]> sources_;     // one per file
  std::atomic<size_t> next_{0};           // the next window
  std::atomic<bool> stopped_{false};
  mutable Mutex mutex_;
  CondVar ended_;
  Result result_ GUARDED_BY(mutex_);
  Failure spare_failure_ GUARDED_BY(mutex_){"read", "", 0, "out of memory"};  // if there is none for another
  size_t working_ GUARDED_BY(mutex_) = 0;                                     // threads
  std::vector<std::thread> threads_;                                          // constant until Close
};

}  // namespace datastates
