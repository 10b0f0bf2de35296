#include "engine/engine.h"

#include <algorithm>
#include <cstring>
#include <system_error>

#include "engine/crc32c.h"
#include "engine/host_copy.h"
#include "os/aligned.h"
#include "os/fork.h"
#include "os/numa.h"
#include "os/threads.h"

namespace datastates {
namespace {

constexpr const char* kClosed = "the engine was closed";
constexpr auto kLook =
    std::chrono::milliseconds(100);  // how often a chunk that waits for its time is looked at

// Aligned copy of the footer; it has memory of its own, so sealing never waits for a slot.
class AlignedCopy {
 public:
  explicit AlignedCopy(const std::string& bytes) : mapping_(std::max<size_t>(bytes.size(), 1)) {
    std::memcpy(mapping_.data(), bytes.data(), bytes.size());
  }
  const uint8_t* data() const { return mapping_.data(); }

 private:
  PrivateMapping mapping_;
};

}  // namespace

Engine::Engine(const Options& options)
    : options_(options),
      backend_(WriteBackend::Named(options.backend)),
      faults_(options.faults),
      copy_rate_(options.copy_bytes_per_second),
      write_rate_(options.write_bytes_per_second) {
  if (options.slot_bytes == 0 || options.slot_bytes % kAlignment != 0 || options.most_slots == 0 ||
      options.copy_threads < 1 || options.write_threads < 1) {
    throw Failure("start engine", "", 0,
                  "slot size must be a multiple of 4096, slots and threads at least 1");
  }
  pool_ = std::make_unique<SlotPool>(options.slot_bytes, options.most_slots);
  try {
    for (int i = 0; i < options.copy_threads; ++i) threads_.emplace_back(&Engine::StageLoop, this);
    threads_.emplace_back(&Engine::AwaitLoop, this);
    for (int i = 0; i < options.write_threads; ++i) threads_.emplace_back(&Engine::WriteLoop, this);
  } catch (const std::system_error& error) {
    Close();
    throw Failure("start engine", "thread", error.code().value());
  }
}

void Engine::Close() {
  while (!CloseWithin(1.0)) continue;
}

bool Engine::CloseWithin(double seconds) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  std::unique_lock<std::mutex> lock(mutex_);
  if (!stop_staging_) {
    for (const auto& weak : jobs_) {
      if (auto job = weak.lock()) job->Cancel(kClosed);
    }
    stop_staging_ = true;
    stage_wake_.notify_all();
  }
  // In this order: what one has filled must still find another that returns its slot.
  if (!ended_.wait_until(lock, deadline, [this] { return staging_ == 0; })) return false;
  stop_awaiting_ = true;
  await_wake_.notify_all();
  if (!ended_.wait_until(lock, deadline, [this] { return awaiting_ == 0; })) return false;
  stop_writing_ = true;
  write_wake_.notify_all();
  if (!ended_.wait_until(lock, deadline, [this] { return writing_ == 0; })) return false;
  lock.unlock();
  for (std::thread& thread : threads_) {
    if (thread.joinable()) thread.join();
  }
  return true;
}

bool Engine::PageLockPool() {
  try {
    auto driver = Driver::Open(options_.driver);
    const CuContext context = driver->CurrentContext();
    const NumaNode node = NodeOfDevice(options_.sysfs, driver->CurrentBusId());
    pool_->Register(std::move(driver), context, node);
    return true;
  } catch (const Failure&) {
    return false;
  }
}

std::shared_ptr<DeviceCopier> Engine::CopierFor(const Batch& batch, CuStream trainer) {
  const bool device =
      std::any_of(batch.runs().begin(), batch.runs().end(), [](const Run& run) { return run.device; });
  if (!device) return nullptr;
  if (!copier_) {
    auto copier = std::make_shared<DeviceCopier>(Driver::Open(options_.driver));
    node_ = NodeOfDevice(options_.sysfs, copier->driver()->CurrentBusId());
    pool_->Register(copier->driver(), copier->context(), node_);
    sample_memory_ = std::make_shared<SampleMemory>(copier->driver(), copier->context(),
                                                    kMostDeviceSamples * kSampleBytes);
    copier_ = std::move(copier);  // last: it stands for all of the above
  } else if (copier_->driver()->CurrentContext() != copier_->context()) {
    throw Failure("start save", "", 0,
                  "the first save of this process was from cuda:" + std::to_string(copier_->device()) +
                      ", this one would be from cuda:" + std::to_string(copier_->driver()->CurrentDevice()) +
                      " or from another context of it: start one process per device");
  }
  copier_->StartAfter(trainer);
  return copier_;
}

std::shared_ptr<SaveJob> Engine::Start(const std::string& path, uint64_t reserve_bytes, Batch batch,
                                       CuStream trainer, double lazy_seconds) {
  auto copier = CopierFor(batch, trainer);
  // Leaked in a forked child: threads of the parent may have been waiting for it at the fork, and a
  // condition variable with waiters cannot be destroyed.
  const auto free_at_home = [home = HomeProcess()](SaveJob* job) {
    if (home.IsHere()) delete job;
  };
  std::shared_ptr<SaveJob> job(new SaveJob(path, options_.direct, options_.checksums, std::move(copier)),
                               free_at_home);
  pool_->Grow(std::max<size_t>(1, reserve_bytes / options_.slot_bytes + 1));
  {
    std::lock_guard<std::mutex> lock(mutex_);
    jobs_.erase(std::remove_if(jobs_.begin(), jobs_.end(), [](const auto& weak) { return weak.expired(); }),
                jobs_.end());
    jobs_.push_back(job);
  }
  Stretch stretch{job, std::make_shared<const Batch>(std::move(batch))};
  job->Begin();  // until all is queued
  if (options_.tripwire) TakeSamples(job, *stretch.batch);
  if (options_.paranoid) {
    Stretch rehearsal = stretch;
    rehearsal.rehearsal = true;
    Queue(std::move(rehearsal));
  }
  stretch.opens = true;
  stretch.reserve_bytes = reserve_bytes;
  stretch.lazy_from =
      Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(lazy_seconds));
  Queue(std::move(stretch));
  job->Done();
  return job;
}

void Engine::AllowLazyCopies(const SaveJob& job, double seconds) {
  const auto from =
      Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  std::lock_guard<std::mutex> lock(mutex_);
  for (Stretch& stretch : stretches_) {
    if (stretch.job.get() == &job) stretch.lazy_from = std::min(stretch.lazy_from, from);
  }
  stage_wake_.notify_all();
}

void Engine::TakeSamples(const std::shared_ptr<SaveJob>& job, const Batch& batch) {
  const bool device = std::any_of(batch.samples().begin(), batch.samples().end(),
                                  [](const auto& sample) { return sample.device; });
  if (!job->TakeSamples(batch, device ? sample_memory_->Borrow() : nullptr)) return;
  std::unique_lock<std::mutex> lock(mutex_);
  if (stop_awaiting_) {
    lock.unlock();
    return AwaitDevice(*job);
  }
  // Nobody may take the job for released, nor its memory back, while the device is still at its samples.
  job->Begin();
  in_flight_.push_back({{job, nullptr, 0, Slot()}, job->copier()->Enqueued()});
  await_wake_.notify_one();
}

void Engine::Append(const std::shared_ptr<SaveJob>& job, Batch batch) {
  Queue(Stretch{job, std::make_shared<const Batch>(std::move(batch))});
}

void Engine::Queue(Stretch stretch) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (stop_staging_) return stretch.job->Cancel(kClosed);
  if (stretch.rehearsal) {
    stretch.job->PlanRehearsal(*stretch.batch);
  } else {
    stretch.job->Plan(*stretch.batch);
  }
  if (stretch.batch->chunks().empty() && !stretch.opens) return;
  stretch.job->Begin();  // the stretch itself, until its last chunk is taken
  stretches_.push_back(std::move(stretch));
  stage_wake_.notify_all();
}

void Engine::Finish(const std::shared_ptr<SaveJob>& job, std::string footer, uint64_t offset) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (stop_writing_) return job->Cancel(kClosed);
  job->Begin();
  footers_.push_back({job, std::move(footer), offset});
  write_wake_.notify_all();
}

// Whether the next chunk's time has not come.
bool Engine::MustWait(const Stretch& stretch) const {
  if (stretch.opens || stretch.rehearsal || stretch.next == stretch.batch->chunks().size()) return false;
  const Batch::Chunk& chunk = stretch.batch->chunks()[stretch.next];
  return chunk.device && !chunk.eager && Clock::now() < stretch.lazy_from && !stretch.job->failed();
}

// Takes the next chunk in the order of the queue, or the opening of a file. A stretch whose file is
// being opened, whose rehearsal ends, or whose next chunk must wait (`later` says that there is one), is
// passed over with everything of its job after it, so that no chunk comes before it.
bool Engine::TakeChunk(Stretch* taken, bool* open, bool* later) {
  std::vector<const SaveJob*> blocked;
  for (auto at = stretches_.begin(); at != stretches_.end(); ++at) {
    if (std::find(blocked.begin(), blocked.end(), at->job.get()) != blocked.end()) continue;
    const size_t chunks = at->batch->chunks().size();
    const bool waits = MustWait(*at);
    *later |= waits;
    if (at->opening || (at->rehearsal && at->next == chunks) || waits) {
      blocked.push_back(at->job.get());
      continue;
    }
    *open = at->opens;
    if (at->opens) at->opening = true;
    *taken = *at;
    if (!at->opens && ++at->next >= chunks && !at->rehearsal) {
      at->job->Done();
      stretches_.erase(at);
    }
    return true;
  }
  return false;
}

void Engine::StageLoop() {
  NameThread("ds-stage");
  std::unique_lock<std::mutex> lock(mutex_);
  ++staging_;
  while (true) {
    Stretch taken;
    bool open = false, later = false;
    if (!TakeChunk(&taken, &open, &later)) {
      if (later) {
        stage_wake_.wait_for(lock, kLook);
      } else if (stop_staging_) {
        break;
      } else {
        stage_wake_.wait(lock);
      }
      continue;
    }
    lock.unlock();
    if (open) {
      OpenFile(taken);
    } else {
      Stage(taken);
    }
    taken = Stretch();
    lock.lock();
  }
  --staging_;
  ended_.notify_all();
}

void Engine::OpenFile(const Stretch& stretch) {
  try {
    if (!stretch.job->failed()) stretch.job->Open(stretch.reserve_bytes, backend_, &faults_);
  } catch (const Failure& failure) {
    stretch.job->Fail(failure);
  } catch (const std::exception& error) {
    stretch.job->Fail(Failure("open", "", 0, error.what()));
  }
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto at = stretches_.begin(); at != stretches_.end(); ++at) {
    if (at->batch != stretch.batch) continue;
    at->opens = at->opening = false;
    if (at->batch->chunks().empty()) {
      at->job->Done();
      stretches_.erase(at);
    }
    break;
  }
  stage_wake_.notify_all();
}

void Engine::EnterDevice(const SaveJob& job) {
  thread_local const DeviceCopier* entered = nullptr;
  if (!job.copier() || entered == job.copier().get()) return;
  job.copier()->EnterThread();
  MoveNearDevice(job);
  entered = job.copier().get();
}

// Threads that read or write slots run where the slots are.
void Engine::MoveNearDevice(const SaveJob& job) {
  thread_local bool moved = false;
  if (!job.copier() || moved) return;
  BindThread(node_);
  moved = true;
}

void Engine::FillSlot(const Stretch& stretch, const Batch::Chunk& chunk, uint8_t* target, bool* device) {
  std::vector<DeviceCopier::Piece> pieces;
  const auto copy = [&](uint8_t* to, const Run& run, uint64_t source, uint64_t bytes, uint64_t count) {
    if (!run.device) {
      CopyPieces(to, bytes, reinterpret_cast<const uint8_t*>(source), run.step_bytes, bytes, count);
      return;
    }
    *device = true;  // before a copy that may be the first of several to be enqueued, and the next fail
    if (count == 1) {
      pieces.push_back({to, source, bytes});
    } else {
      stretch.job->copier()->CopyPieces(to, source, bytes, run.step_bytes, count);
    }
  };
  stretch.batch->Fill(chunk, target, copy);
  if (!pieces.empty()) stretch.job->copier()->Copy(pieces);
}

void Engine::Stage(const Stretch& stretch) {
  SaveJob& job = *stretch.job;
  const Batch::Chunk& chunk = stretch.batch->chunks()[stretch.next];
  Slot slot;
  bool device = false;
  try {
    slot = SlotFor(job, chunk);
    if (slot) {
      EnterDevice(job);
      FillSlot(stretch, chunk, slot.data(), &device);
      if (!stretch.rehearsal) return PassOn(stretch, device, &slot);
      if (device) job.copier()->WaitFor(job.copier()->Enqueued());
      device = false;
      job.Rehearsed(stretch.next, Crc32c(0, slot.data(), chunk.bytes));
    }
  } catch (const Failure& failure) {
    job.Fail(failure);
  } catch (const std::exception& error) {
    job.Fail(Failure("stage", "", 0, error.what()));
  }
  if (device) AwaitDevice(job);
  slot.Return();
  if (stretch.rehearsal) EndRehearsal(stretch);
  job.Done();
}

void Engine::PassOn(const Stretch& stretch, bool device, Slot* slot) {
  const Batch::Chunk& chunk = stretch.batch->chunks()[stretch.next];
  stretch.job->Staged(*stretch.batch, chunk);
  if (!device) stretch.job->Copied(*stretch.batch, chunk);
  FilledChunk filled{stretch.job, stretch.batch, stretch.next, std::move(*slot)};
  std::lock_guard<std::mutex> lock(mutex_);
  if (device) {
    in_flight_.push_back({std::move(filled), stretch.job->copier()->Enqueued()});
    await_wake_.notify_one();
  } else {
    filled_.push_back(std::move(filled));
    write_wake_.notify_one();
  }
}

void Engine::EndRehearsal(const Stretch& stretch) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto at = std::find_if(stretches_.begin(), stretches_.end(), [&](const Stretch& other) {
    return other.rehearsal && other.batch == stretch.batch;
  });
  if (++at->rehearsed < at->batch->chunks().size()) return;
  at->job->Done();
  stretches_.erase(at);
  stage_wake_.notify_all();
}

Slot Engine::SlotFor(SaveJob& job, const Batch::Chunk& chunk) {
  const auto give_up = [&job] { return job.failed(); };
  copy_rate_.Spend(chunk.bytes, give_up);
  if (job.failed()) return Slot();
  const auto before = std::chrono::steady_clock::now();
  double growing = 0;
  Slot slot = pool_->Acquire(give_up, &growing);
  job.SlotWait(std::chrono::duration<double>(std::chrono::steady_clock::now() - before).count(), growing);
  return slot;
}

// After an error: copies already enqueued may still read their sources, and write to the slot or the samples.
void Engine::AwaitDevice(const SaveJob& job) {
  try {
    job.copier()->driver()->CurrentContext();  // throws on a thread that could not enter it
    job.copier()->WaitForAll();
  } catch (const Failure&) {
    // The context is gone, and with it every copy. The first error has been kept.
  }
}

void Engine::AwaitLoop() {
  NameThread("ds-await");
  std::unique_lock<std::mutex> lock(mutex_);
  ++awaiting_;
  while (true) {
    if (in_flight_.empty()) {
      if (stop_awaiting_) break;
      await_wake_.wait(lock);
      continue;
    }
    CopiedChunk copied = std::move(in_flight_.front());
    in_flight_.pop_front();
    lock.unlock();
    const bool is_whole = Await(copied);
    if (!is_whole) copied.filled.slot.Return();
    if (!is_whole || !copied.filled.batch) copied.filled.job->Done();
    lock.lock();
    if (is_whole && copied.filled.batch) {
      filled_.push_back(std::move(copied.filled));
      write_wake_.notify_one();
    }
    lock.unlock();
    copied = CopiedChunk();
    lock.lock();
  }
  --awaiting_;
  ended_.notify_all();
}

// Whatever fails: the device must be done with the slot before anybody else gets it.
bool Engine::Await(const CopiedChunk& copied) {
  const FilledChunk& filled = copied.filled;
  SaveJob& job = *filled.job;
  try {
    EnterDevice(job);
    job.copier()->WaitFor(copied.place);
    if (filled.batch) job.Copied(*filled.batch, filled.batch->chunks()[filled.chunk]);
    return true;
  } catch (const Failure& failure) {
    job.Fail(failure);
  } catch (const std::exception& error) {
    job.Fail(Failure("await copies", "", 0, error.what()));
  }
  AwaitDevice(job);
  return false;
}

void Engine::WriteLoop() {
  NameThread("ds-write");
  std::unique_lock<std::mutex> lock(mutex_);
  ++writing_;
  while (true) {
    if (!footers_.empty()) {  // first: one save is not to wait for all data of the next
      Footer footer = std::move(footers_.front());
      footers_.pop_front();
      lock.unlock();
      WriteFooter(footer);
      footer = Footer();
      lock.lock();
    } else if (!filled_.empty()) {
      FilledChunk chunk = std::move(filled_.front());
      filled_.pop_front();
      lock.unlock();
      Write(std::move(chunk));
      chunk = FilledChunk();
      lock.lock();
    } else if (stop_writing_) {
      break;
    } else {
      write_wake_.wait(lock);
    }
  }
  --writing_;
  ended_.notify_all();
}

void Engine::Write(FilledChunk filled) {
  SaveJob& job = *filled.job;
  MoveNearDevice(job);
  const Batch::Chunk& chunk = filled.batch->chunks()[filled.chunk];
  try {
    write_rate_.Spend(chunk.bytes, [&job] { return job.failed(); });
    if (!job.failed() && job.Verify(*filled.batch, filled.chunk, filled.slot.data())) {
      job.Written(chunk, filled.slot.data());
    }
  } catch (const Failure& failure) {
    job.Fail(failure);
  } catch (const std::exception& error) {
    job.Fail(Failure("write", "", 0, error.what()));
  }
  filled.slot.Return();
  job.Done();
}

void Engine::WriteFooter(const Footer& footer) {
  try {
    if (!footer.job->failed()) {
      const AlignedCopy copy(footer.bytes);
      footer.job->WriteFooter(copy.data(), footer.bytes.size(), footer.offset);
    }
  } catch (const Failure& failure) {
    footer.job->Fail(failure);
  } catch (const std::exception& error) {
    footer.job->Fail(Failure("write footer", "", 0, error.what()));
  }
  footer.job->Done();
}

}  // namespace datastates
