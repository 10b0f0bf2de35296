// The threads that read. Each takes the next window of the plan, reads it into a slot, checks its blocks, and
// copies what was asked for to where it goes; a slot whose bytes a device still copies stays with its thread.
//
// No deadlock: a thread that holds a slot never waits for another one. Files are opened when a thread comes
// to their first window and closed when the last thread leaves them, so there are never more open than
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

// The memory that reads go through, for any number of jobs: a slot a thread, two where a target is on a
// device, of which one is copied from while the other is read into. Page-locked as soon as there is such a
// target.
class Reader {
 public:
  struct Options {
    bool direct = true;
    int threads = 4;
    size_t slot_bytes = size_t{4} << 20;  // the longest read; a multiple of kBlockBytes
    std::string driver = "libcuda.so.1";
    std::string faults;
    std::string sysfs = "/sys";  // os/numa.h
  };

  // Throws Failure for options that make no sense. Takes no memory yet.
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
    std::vector<BadBlock> bad_blocks;  // all there are, by file and block; nothing of them was delivered
    std::optional<Failure> failure;    // of the first call that failed; ends the job
  };

  // Starts the threads and returns. Device targets need `trainer`, the stream that last used them, and the
  // calling thread's CUDA context. Throws Failure for a plan that makes no sense, before anything is opened,
  // and for threads or a driver that cannot be had.
  ReadJob(std::shared_ptr<Reader> reader, ReadPlan plan, CuStream trainer);
  ~ReadJob() { Close(); }
  ReadJob(const ReadJob&) = delete;
  ReadJob& operator=(const ReadJob&) = delete;

  // Whether it is over within that time: all is delivered, also on devices, or it has failed.
  bool Wait(double seconds);
  // Gives up what is not delivered and joins every thread. No target is written to afterwards.
  void Close();
  Result result() const;  // so far

 private:
  // A file that some thread reads is open.
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
    std::optional<DeviceCopier::Place> copied;  // none: nobody reads from the slot
  };

  void Work();
  void ReadWindows();
  void Open(size_t file, Opened* opened);
  bool TakeSlot(std::deque<Lent>* lent);
  bool Check(const ReadPlan::Window& window, uint64_t begin, uint64_t end, const uint8_t* data);
  bool Deliver(const ReadPlan::Window& window, const uint8_t* data);
  void AwaitDevice();
  void Fail(const Failure& failure);

  const std::shared_ptr<Reader> reader_;
  const ReadPlan plan_;
  std::shared_ptr<DeviceCopier> copier_;  // constant after construction
  NumaNode node_;                         // of its device; likewise
  std::unique_ptr<Source[]> sources_;     // one a file
  std::atomic<size_t> next_{0};           // window
  std::atomic<bool> stopped_{false};
  mutable Mutex mutex_;
  CondVar ended_;
  Result result_ GUARDED_BY(mutex_);
  size_t working_ GUARDED_BY(mutex_) = 0;  // threads
  std::vector<std::thread> threads_;       // constant until Close
};

}  // namespace datastates
