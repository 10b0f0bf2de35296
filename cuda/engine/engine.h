// The engine: the threads that take saves from plan to durable file. Their queues and their order belong
// here; what a save has reached is in SaveJob, which states the milestones.
//
//   ds-stage (copy_threads): take chunks in the order of the file, fill a slot of the pool with each, and so
//     bring it to `enqueued`. Chunks in host memory are copied then, and so are `staged` at the same time.
//   ds-await (one): waits, in the order of the stream, for the device copies of each chunk, which are then
//     `staged`, independently of the disk.
//   ds-write (write_threads): open files, verify chunks, write them and return their slots, which brings the
//     save to `written`; a footer makes it `durable`. Publishing is Python's. Opening and reserving may take
//     seconds on a busy file system, and as long as a copy in tmpfs: staging does not wait for it.
//
// The threads hand chunks over through queues, so a full pool delays staging and nothing else (staging/pool.h
// shows why it cannot deadlock).
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
    bool discard;             // write nothing, to measure copies without a disk
    bool tripwire;            // take samples: engine/tripwire.h
    bool paranoid;            // copy fenced chunks twice and compare checksums (save_job.h)
    std::string sysfs;        // os/numa.h
    uint64_t most_in_flight;  // bytes of device copies (device/copier.h)
    uint64_t sample_seed;     // of the first save; each later one adds 1. 0: random
  };

  // Starts the threads. Throws Failure for invalid options, or if a thread cannot be started.
  explicit Engine(const Options& options);
  ~Engine() { Close(); }
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Cancels what is unfinished and joins every thread. Jobs passed to a closed engine are cancelled.
  void Close();
  // The same, for at most that time; returns whether it is done.
  bool CloseWithin(double seconds);

  // Page-locks the pool in the background from now on if this thread has a CUDA context; returns whether it
  // has. Without this, the first device save does it. Throws no Failure: that save would report it.
  bool PageLockPool();

  // Begins a data file at `path` with `batch`; `reserve_bytes` are reserved on disk before the first write.
  // Takes samples of lazy spans and returns at once. Device spans need `trainer`, the stream that last wrote
  // their sources; the calling thread's CUDA context is used. Lazy copies begin after `lazy_seconds`, or as
  // AllowLazyCopies says: a trainer that synchronizes the device right after the save would wait for every
  // copy enqueued by then, and one that waits for another thread would wait for a core. Throws Failure only
  // for invalid arguments, a missing driver and a missing thread, and std::bad_alloc, all before anything of
  // the job is queued; what goes wrong later fails the job. With Output::kDigests nothing is made at `path`,
  // which only names the job in errors.
  std::shared_ptr<SaveJob> Start(const std::string& path, uint64_t reserve_bytes, Batch batch, Output output,
                                 CuStream trainer, double lazy_seconds);
  // Lets the job's lazy copies begin at the latest `seconds` from now. `hurries`: the trainer waits for them.
  void AllowLazyCopies(const SaveJob& job, double seconds, bool hurries);
  // Adds bytes to a file that was begun; their sources stay valid until kAppended or, if the job fails, until
  // kReleased. They do not wait for lazy chunks: serializing is slow, and goes on while tensors are staged.
  void Append(const std::shared_ptr<SaveJob>& job, Batch batch);
  // Writes the footer and makes the file durable, after everything else of the job (kDurable).
  void Finish(const std::shared_ptr<SaveJob>& job, std::string footer, uint64_t offset);

  // Returns the seed of one batch's samples (engine/sampling.h).
  uint64_t NextSeed() { return next_seed_++; }

  SlotPool& pool() { return *pool_; }
  const Options& options() const { return options_; }

 private:
  using Clock = std::chrono::steady_clock;

  // A batch whose chunks staging threads take one by one.
  struct QueuedBatch {
    std::shared_ptr<SaveJob> job;
    std::shared_ptr<const Batch> batch;
    size_t next = 0;
    Clock::time_point lazy_from{};  // when lazy chunks may be copied
    bool looks = false;             // the tripwire's second look is due, before the first lazy chunk
    bool busy = false;              // a thread looks; others take the next batch
    bool appended = false;          // added to a file that was begun; see Choose
    // The first of two passes: chunks are only checksummed. The job's other batches wait for its end.
    bool first_pass = false;
    size_t checksummed = 0;  // chunks of the first pass
  };
  struct FilledChunk {
    std::shared_ptr<SaveJob> job;
    std::shared_ptr<const Batch> batch;
    size_t chunk;
    Slot slot;
    std::vector<BlockPart> parts;  // their checksums, if the copy has taken them
  };
  // A chunk, or a job's samples, that the device has copied once its stream has reached `place`.
  struct CopiedChunk {
    FilledChunk filled;  // samples have no batch
    DeviceCopier::Place place;
  };
  // A file that is to be opened before anything of the job is written.
  struct Opening {
    std::shared_ptr<SaveJob> job;
    uint64_t reserve_bytes;
  };
  struct Footer {
    std::shared_ptr<SaveJob> job;
    std::string bytes;
    uint64_t offset;
  };

  void TakeSamples(const std::shared_ptr<SaveJob>& job, const Batch& batch);
  size_t SlotsOf(const Batch& batch, uint64_t reserve_bytes) const;
  void QueueOpening(const std::shared_ptr<SaveJob>& job, uint64_t reserve_bytes);
  void Queue(QueuedBatch queued);
  void StageLoop();
  void AwaitLoop();
  void WriteLoop();
  bool TakeTask(QueuedBatch* taken, Clock::time_point* later) REQUIRES(mutex_);
  std::deque<QueuedBatch>::iterator Choose(Clock::time_point* later) REQUIRES(mutex_);
  static bool IsToLook(const QueuedBatch& queued);
  bool MustWait(const QueuedBatch& queued) const REQUIRES(mutex_);
  void NoteBegin(int* threads) REQUIRES(mutex_);
  // Waits until none of these threads is in its loop; returns false if that takes too long.
  bool AwaitEnd(const int& threads, Clock::time_point deadline) REQUIRES(mutex_);
  template <typename Item>
  static typename std::deque<Item>::iterator FirstReady(std::deque<Item>& items);
  void OpenFile(const Opening& opening);
  void Look(const QueuedBatch& queued);
  std::deque<QueuedBatch>::iterator Find(const QueuedBatch& taken) REQUIRES(mutex_);
  void Stage(const QueuedBatch& queued);
  void PassOn(FilledChunk* filled, bool device);
  void PassToWriters(FilledChunk* filled);
  void EndFirstCopy(const QueuedBatch& queued);
  std::vector<BlockPart> FillSlot(const QueuedBatch& queued, const Batch::Chunk& chunk, uint8_t* target,
                                  bool* device);
  Slot SlotFor(SaveJob& job, const Batch::Chunk& chunk);
  void Await(CopiedChunk* copied);
  void Write(FilledChunk chunk);
  void WriteFooter(const Footer& footer);
  std::shared_ptr<DeviceCopier> CopierFor(const Batch& batch, CuStream trainer);
  void EnterDevice(const SaveJob& job);
  void MoveNearDevice(const SaveJob& job);

  const Options options_;
  Faults faults_;
  RateLimit copy_rate_, write_rate_;
  std::atomic<uint64_t> next_seed_;
  std::unique_ptr<SlotPool> pool_;
  std::shared_ptr<DeviceCopier> copier_;  // created and used on the trainer's thread
  // Constant from the first device job on.
  std::shared_ptr<SampleMemory> sample_memory_;
  NumaNode node_;  // of the copier's device

  Mutex mutex_;
  CondVar stage_wake_, await_wake_, write_wake_;
  CondVar ended_;  // a thread has come to its loop, or left it
  std::deque<QueuedBatch> queue_ GUARDED_BY(mutex_);
  std::vector<const SaveJob*> blocked_ GUARDED_BY(mutex_);  // in Choose; has room for every batch of queue_
  std::deque<CopiedChunk> in_flight_ GUARDED_BY(mutex_);
  std::deque<FilledChunk> filled_ GUARDED_BY(mutex_);
  std::deque<Opening> openings_ GUARDED_BY(mutex_);
  std::deque<Footer> footers_ GUARDED_BY(mutex_);
  std::vector<std::weak_ptr<SaveJob>> jobs_ GUARDED_BY(mutex_);
  bool appended_next_ GUARDED_BY(mutex_) = true;  // of an appended and a lazy chunk, take the appended one
  bool stop_staging_ GUARDED_BY(mutex_) = false;
  bool stop_awaiting_ GUARDED_BY(mutex_) = false;
  bool stop_writing_ GUARDED_BY(mutex_) = false;
  size_t begun_ GUARDED_BY(mutex_) = 0;  // threads that have come to their loops
  // Threads in their loops.
  int staging_ GUARDED_BY(mutex_) = 0, awaiting_ GUARDED_BY(mutex_) = 0, writing_ GUARDED_BY(mutex_) = 0;
  std::vector<std::thread> threads_;  // constant after construction
};

}  // namespace datastates
