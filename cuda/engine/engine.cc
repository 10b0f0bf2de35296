#include "engine/engine.h"

#include <algorithm>
#include <random>
#include <system_error>

#include "os/aligned.h"
#include "os/fork.h"
#include "os/numa.h"

namespace datastates {
namespace {

// A chunk of the tail takes a slot, and is smaller if slots are (engine/tail.py).
constexpr uint64_t kTailChunk = uint64_t{4} << 20;
constexpr uint64_t kMostTailSlots = 4;
constexpr const char* kClosed = "the engine was closed";

uint64_t RandomSeed() {
  std::random_device device;
  return (uint64_t{device()} << 32) | device();
}

// Whether the tripwire's second look has anything to cover.
bool HasLazyHostSpans(const Batch& batch) {
  return std::any_of(batch.spans().begin(), batch.spans().end(),
                     [](const Span& span) { return !span.eager && !span.device; });
}

// Whether the trainer waits for copies from a device before the start of the save returns.
bool HasEagerDeviceSpans(const Batch& batch) {
  return std::any_of(batch.spans().begin(), batch.spans().end(),
                     [](const Span& span) { return span.eager && span.device; });
}

}  // namespace

Engine::Engine(const Options& options)
    : options_(options),
      faults_(options.faults),
      copy_rate_(options.copy_bytes_per_second),
      write_rate_(options.write_bytes_per_second),
      next_seed_(options.sample_seed != 0 ? options.sample_seed : RandomSeed()) {
  if (options.slot_bytes == 0 || options.slot_bytes % kAlignment != 0 || options.most_slots == 0 ||
      options.copy_threads < 1 || options.write_threads < 1) {
    throw Failure("start engine", "", 0,
                  "slot size must be a positive multiple of 4096, found " +
                      std::to_string(options.slot_bytes) + "; slots and threads must be at least 1, found " +
                      std::to_string(options.most_slots) + " slots, " + std::to_string(options.copy_threads) +
                      " copy threads and " + std::to_string(options.write_threads) + " write threads");
  }
  pool_ = std::make_unique<SlotPool>(options.slot_bytes, options.most_slots);
  try {
    for (int i = 0; i < options.copy_threads; ++i) threads_.emplace_back(&Engine::StageLoop, this);
    threads_.emplace_back(&Engine::AwaitLoop, this);
    for (int i = 0; i < options.write_threads; ++i) threads_.emplace_back(&Engine::WriteLoop, this);
  } catch (const std::system_error& error) {
    Close();
    throw Failure("start engine", "thread", error.code().value());
  } catch (const std::exception&) {  // no memory
    Close();
    throw;
  }
}

void Engine::Close() {
  while (!CloseWithin(1.0)) continue;
}

bool Engine::CloseWithin(double seconds) {
  const auto deadline = DeadlineAfter(seconds);
  MutexLock lock(mutex_);
  if (!stop_staging_) {
    for (const auto& weak : jobs_) {
      if (auto job = weak.lock()) job->Cancel(kClosed);
    }
    stop_staging_ = true;
    stage_wake_.NotifyAll();
  }
  // Else a thread that the system runs late would find nobody who takes what it has to hand on.
  while (begun_ != threads_.size()) {
    if (!ended_.WaitUntil(mutex_, deadline)) return false;
  }
  // In this order: a chunk that one kind of thread has filled needs the next kind to return its slot.
  if (!AwaitEnd(staging_, deadline)) return false;
  stop_awaiting_ = true;
  await_wake_.NotifyAll();
  if (!AwaitEnd(awaiting_, deadline)) return false;
  stop_writing_ = true;
  write_wake_.NotifyAll();
  if (!AwaitEnd(writing_, deadline)) return false;
  lock.Unlock();
  for (std::thread& thread : threads_) {
    if (thread.joinable()) thread.join();
  }
  return true;
}

void Engine::NoteBegin(int* threads) {
  ++*threads;
  ++begun_;
  ended_.NotifyAll();
}

bool Engine::AwaitEnd(const int& threads, Clock::time_point deadline) {
  while (threads != 0) {
    if (!ended_.WaitUntil(mutex_, deadline)) return threads == 0;
  }
  return true;
}

bool Engine::PageLockPool() {
  try {
    auto driver = Driver::Open(options_.driver);
    const CuContext context = driver->CurrentContext();
    if (context == nullptr) return false;
    const NumaNode node = NodeOfDevice(options_.sysfs, driver->CurrentBusId());
    pool_->Register(std::move(driver), context, node);
    return true;
  } catch (const Failure&) {
    return false;
  }
}

std::shared_ptr<DeviceCopier> Engine::CopierFor(const Batch& batch, CuStream trainer) {
  const bool device =
      std::any_of(batch.spans().begin(), batch.spans().end(), [](const Span& span) { return span.device; });
  if (!device) return nullptr;
  if (!copier_) {
    auto copier = std::make_shared<DeviceCopier>(Driver::Open(options_.driver), options_.most_in_flight);
    node_ = NodeOfDevice(options_.sysfs, copier->driver()->CurrentBusId());
    pool_->Register(copier->driver(), copier->context(), node_);
    sample_memory_ = std::make_shared<SampleMemory>(copier->driver(), copier->context(),
                                                    kMostDeviceSamples * kSampleBytes);
    copier_ = std::move(copier);  // last: a copier means that all of the above succeeded
  } else if (copier_->driver()->EnterContext() != copier_->context()) {
    throw Failure("start save", "", 0,
                  "the first save of this process was from cuda:" + std::to_string(copier_->device()) +
                      ", this one would be from cuda:" + std::to_string(copier_->driver()->CurrentDevice()) +
                      " or from another context of it: start one process per device");
  }
  copier_->StartAfter(trainer);
  return copier_;
}

// Returns how many slots a file needs, so that its copies wait for no write. The first write waits for the
// file's reservation, which takes as long as a copy in tmpfs. A long tail (encoded tensors, streams) waits
// for its own writes, as in a pool of the file's size.
size_t Engine::SlotsOf(const Batch& batch, uint64_t reserve_bytes) const {
  const auto& chunks = batch.chunks();
  const uint64_t end = chunks.empty() ? 0 : chunks.back().offset + chunks.back().bytes;
  const uint64_t tail = std::max(reserve_bytes, end) - end;
  const uint64_t of_tail = tail / std::min<uint64_t>(options_.slot_bytes, kTailChunk) + 1;
  return std::max<size_t>(chunks.size() + std::min(of_tail, kMostTailSlots),
                          reserve_bytes / options_.slot_bytes + 1);
}

std::shared_ptr<SaveJob> Engine::Start(const std::string& path, uint64_t reserve_bytes, Batch batch,
                                       Output output, CuStream trainer, double lazy_seconds) {
  if (output != Output::kFile && options_.slot_bytes % kBlockBytes != 0) {
    throw Failure(
        "start save", "", 0,
        "digests need slots of whole MiBs, not of " + std::to_string(options_.slot_bytes) + " bytes");
  }
  auto copier = CopierFor(batch, trainer);
  // Leaked in a forked child: threads of the parent may have been waiting for it at the fork, and a
  // condition variable with waiters cannot be destroyed.
  const auto free_at_home = [home = HomeProcess()](SaveJob* job) {
    if (home.IsHere()) delete job;
  };
  std::shared_ptr<SaveJob> job(
      new SaveJob(path, options_.direct, options_.checksums, output, std::move(copier)), free_at_home);
  pool_->Grow(SlotsOf(batch, reserve_bytes));
  {
    const MutexLock lock(mutex_);
    jobs_.erase(std::remove_if(jobs_.begin(), jobs_.end(), [](const auto& weak) { return weak.expired(); }),
                jobs_.end());
    jobs_.push_back(job);
  }
  QueuedBatch queued{job, std::make_shared<const Batch>(std::move(batch))};
  queued.looks = options_.tripwire && !options_.paranoid && HasLazyHostSpans(*queued.batch);
  queued.lazy_from = DeadlineAfter(lazy_seconds);
  job->BeginTask();  // so that the job is not released before everything is queued
  try {
    if (job->writes()) QueueOpening(job, reserve_bytes);
    if (options_.tripwire) TakeSamples(job, *queued.batch);
    if (job->copier()) job->copier()->Hurry(HasEagerDeviceSpans(*queued.batch));
    if (options_.paranoid) {
      QueuedBatch first_pass{job, queued.batch};
      first_pass.first_pass = true;
      Queue(std::move(first_pass));
    }
    Queue(std::move(queued));
  } catch (const std::exception& error) {
    // Something of the job may be queued and read sources: the caller gets the job, to wait for its end.
    job->FailIn("start save", error);
  }
  job->EndTask();
  return job;
}

void Engine::AllowLazyCopies(const SaveJob& job, double seconds, bool hurries) {
  if (job.copier()) job.copier()->Hurry(hurries);
  const auto from = DeadlineAfter(seconds);
  const MutexLock lock(mutex_);
  for (QueuedBatch& queued : queue_) {
    if (queued.job.get() == &job) queued.lazy_from = std::min(queued.lazy_from, from);
  }
  stage_wake_.NotifyAll();
}

void Engine::TakeSamples(const std::shared_ptr<SaveJob>& job, const Batch& batch) {
  const bool device = batch.samples().all.size() > batch.samples().host;
  auto device_memory = device ? sample_memory_->Borrow() : nullptr;
  if (!job->BeginRead()) return;
  if (!job->TakeSamples(batch, std::move(device_memory))) return job->EndRead();
  try {
    const MutexLock lock(mutex_);
    if (!stop_awaiting_) {
      CopiedChunk& copied = in_flight_.emplace_back();
      // The job must not be released, nor its memory returned, while the device is copying samples.
      job->BeginTask();
      copied = {{job, nullptr, 0, Slot(), {}}, job->copier()->Enqueued()};
      return await_wake_.NotifyOne();
    }
  } catch (const std::exception& error) {
    job->FailIn("take samples", error);
  }
  if (!job->copier()->Drain()) sample_memory_->Abandon();  // copies of samples may have been enqueued
  job->EndRead();
}

void Engine::QueueOpening(const std::shared_ptr<SaveJob>& job, uint64_t reserve_bytes) {
  const MutexLock lock(mutex_);
  if (stop_staging_) return job->Cancel(kClosed);
  openings_.push_back({job, reserve_bytes});
  job->BeginTask();
  write_wake_.NotifyOne();
}

void Engine::Append(const std::shared_ptr<SaveJob>& job, Batch batch) {
  QueuedBatch queued{job, std::make_shared<const Batch>(std::move(batch))};
  queued.appended = true;
  Queue(std::move(queued));
}

void Engine::Queue(QueuedBatch queued) {
  SaveJob& job = *queued.job;
  const MutexLock lock(mutex_);
  if (stop_staging_) return job.Cancel(kClosed);
  if (queued.batch->chunks().empty()) return;
  if (queued.first_pass) job.MakeRoomForFirstPass(*queued.batch);
  blocked_.reserve(queue_.size() + 1);
  queue_.push_back(std::move(queued));
  // Nothing fails from here on: every task that is counted is in the queue.
  const QueuedBatch& added = queue_.back();
  added.first_pass ? job.CountFirstPass(*added.batch) : job.CountPlanned(*added.batch);
  job.BeginTask();  // the batch itself, until its last chunk is taken
  stage_wake_.NotifyAll();
}

void Engine::Finish(const std::shared_ptr<SaveJob>& job, std::string footer, uint64_t offset) {
  const MutexLock lock(mutex_);
  if (stop_writing_) return job->Cancel(kClosed);
  footers_.push_back({job, std::move(footer), offset});  // first: it may find no memory
  job->BeginTask();
  write_wake_.NotifyAll();
}

}  // namespace datastates
