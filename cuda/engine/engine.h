// The threads that stage, await the device, and write. Staging threads fill slots in the order of the file.
// What a device copies, one thread awaits in the order of its stream: a chunk counts as copied as soon as it
// is, whatever the disk does. Writing threads drain the slots. They meet in queues, so a full pool holds
// staging back and nothing else.
#pragma once

#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "engine/rate.h"
#include "engine/save_job.h"
#include "os/mutex.h"
#include "staging/pool.h"
#include "staging/sample_memory.h"

namespace datastates {

class Engine {
 public:
  // The bindings pass every value; defaults are theirs and config.py's.
  struct Options {
    size_t slot_bytes;
    size_t most_slots;
    int copy_threads;
    int write_threads;
    bool direct;
    bool checksums;
    uint64_t copy_bytes_per_second;   // 0: no limit
    uint64_t write_bytes_per_second;  // 0: no limit
    std::string driver;
    std::string faults;
    std::string backend;   // os/write_backend.h
    bool tripwire;         // take samples: engine/tripwire.h
    bool paranoid;         // copy every chunk twice, the first time eagerly, and compare checksums
    std::string sysfs;     // os/numa.h
    uint64_t sample_seed;  // of the first save's samples, the next has the next; 0: a random one
  };

  // Starts the threads. Throws Failure for options that make no sense, or if there are no threads to be had.
  explicit Engine(const Options& options);
  ~Engine() { Close(); }
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Cancels what is not finished and joins every thread. What is given to a closed engine is cancelled.
  void Close();
  // The same, as far as it gets in that time; gives whether it is done.
  bool CloseWithin(double seconds);

  // Page-locks the pool in the background from now on, if this thread has a CUDA context; gives whether it
  // has. Without this, the first device save does it. Never throws Failure: that save would tell.
  bool PageLockPool();

  // Begins a data file at `path` with `batch`; `reserve_bytes` are claimed before the first copy.
  // Takes samples of lazy runs and returns at once. Device runs need `trainer`, the stream that last wrote
  // their sources; the calling thread's CUDA context is used. Lazy copies from a device begin after
  // `lazy_seconds`, or when AllowLazyCopies says so: what is enqueued, a trainer that synchronizes the device
  // right after the save would wait for. Throws Failure only for wrong arguments and a missing driver.
  std::shared_ptr<SaveJob> Start(const std::string& path, uint64_t reserve_bytes, Batch batch,
                                 CuStream trainer, double lazy_seconds);
  // The job's lazy copies begin `seconds` from now, if not earlier.
  void AllowLazyCopies(const SaveJob& job, double seconds);
  // More bytes for a file that was begun; their sources stay valid until kReleased.
  void Append(const std::shared_ptr<SaveJob>& job, Batch batch);
  // Writes the footer and makes the file durable, after everything else of the job (kDurable).
  void Finish(const std::shared_ptr<SaveJob>& job, std::string footer, uint64_t offset);

  // For one batch: where it is sampled (engine/sampling.h).
  uint64_t NextSeed() { return next_seed_++; }

  SlotPool& pool() { return *pool_; }
  const Options& options() const { return options_; }

 private:
  using Clock = std::chrono::steady_clock;

  // The chunks of one batch, handed out one by one.
  struct QueuedBatch {
    std::shared_ptr<SaveJob> job;
    std::shared_ptr<const Batch> batch;
    size_t next = 0;
    uint64_t reserve_bytes = 0;
    Clock::time_point lazy_from{};  // of chunks that are copied from a device, but not eagerly
    bool opens = false;             // the file is opened before this queued's first chunk
    bool looks = false;             // the tripwire looks before the first chunk that is not eager
    bool busy = false;              // a thread opens or looks; the others take the next queued
    // Chunks are copied to be checksummed, not to be written. Everything of the job comes after.
    bool first_pass = false;
    size_t checksummed = 0;
  };
  struct FilledChunk {
    std::shared_ptr<SaveJob> job;
    std::shared_ptr<const Batch> batch;
    size_t chunk;
    Slot slot;
  };
  // The device is done with a chunk, or with the samples of a job, when its stream has come to `place`.
  struct CopiedChunk {
    FilledChunk filled;  // without a batch: samples
    DeviceCopier::Place place;
  };
  struct Footer {
    std::shared_ptr<SaveJob> job;
    std::string bytes;
    uint64_t offset;
  };

  void TakeSamples(const std::shared_ptr<SaveJob>& job, const Batch& batch);
  void Queue(QueuedBatch queued);
  void StageLoop();
  void AwaitLoop();
  void WriteLoop();
  enum class Task { kOpen, kLook, kStage };
  bool TakeTask(QueuedBatch* taken, Task* task, bool* later) REQUIRES(mutex_);
  static Task NextOf(const QueuedBatch& queued);
  bool MustWait(const QueuedBatch& queued) const REQUIRES(mutex_);
  // Waits until none of these threads is in its loop; returns false if that takes too long.
  bool AwaitEnd(const int& threads, Clock::time_point deadline) REQUIRES(mutex_);
  void OpenFile(const QueuedBatch& queued);
  void Look(const QueuedBatch& queued);
  std::deque<QueuedBatch>::iterator Find(const QueuedBatch& taken) REQUIRES(mutex_);
  void Stage(const QueuedBatch& queued);
  void PassOn(const QueuedBatch& queued, bool device, Slot* slot);
  void EndFirstCopy(const QueuedBatch& queued);  // of one chunk
  void FillSlot(const QueuedBatch& queued, const Batch::Chunk& chunk, uint8_t* target, bool* device);
  Slot SlotFor(SaveJob& job, const Batch::Chunk& chunk);
  void AwaitDevice(const SaveJob& job);
  bool Await(const CopiedChunk& copied);
  void Write(FilledChunk chunk);
  void WriteFooter(const Footer& footer);
  std::shared_ptr<DeviceCopier> CopierFor(const Batch& batch, CuStream trainer);
  void EnterDevice(const SaveJob& job);
  void MoveNearDevice(const SaveJob& job);

  const Options options_;
  WriteBackend* const backend_;
  Faults faults_;
  RateLimit copy_rate_, write_rate_;
  std::atomic<uint64_t> next_seed_;
  std::unique_ptr<SlotPool> pool_;
  // Made and used on the trainer's thread.
  std::shared_ptr<DeviceCopier> copier_;
  std::shared_ptr<SampleMemory> sample_memory_;
  NumaNode node_;  // of the copier's device; constant from its first job on

  Mutex mutex_;
  CondVar stage_wake_, await_wake_, write_wake_, ended_;
  std::deque<QueuedBatch> queue_ GUARDED_BY(mutex_);
  std::deque<CopiedChunk> in_flight_ GUARDED_BY(mutex_);
  std::deque<FilledChunk> filled_ GUARDED_BY(mutex_);
  std::deque<Footer> footers_ GUARDED_BY(mutex_);
  std::vector<std::weak_ptr<SaveJob>> jobs_ GUARDED_BY(mutex_);
  bool stop_staging_ GUARDED_BY(mutex_) = false;
  bool stop_awaiting_ GUARDED_BY(mutex_) = false;
  bool stop_writing_ GUARDED_BY(mutex_) = false;
  // Threads in their loops.
  int staging_ GUARDED_BY(mutex_) = 0, awaiting_ GUARDED_BY(mutex_) = 0, writing_ GUARDED_BY(mutex_) = 0;
  std::vector<std::thread> threads_;  // constant after construction
};

}  // namespace datastates
