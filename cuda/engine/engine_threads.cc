// The bodies of the engine's threads: staging, awaiting the device, writing. See engine.h for their order.
#include <algorithm>
#include <chrono>
#include <cstring>

#include "engine/block_sums.h"
#include "engine/crc32c.h"
#include "engine/engine.h"
#include "engine/host_copy.h"
#include "os/aligned.h"
#include "os/numa.h"
#include "os/threads.h"

namespace datastates {
namespace {

// How often a staging thread checks, at least, whether a lazy chunk may be copied, and a writing thread
// whether a job without a file has failed.
constexpr auto kPollInterval = std::chrono::milliseconds(100);

// An aligned copy of the footer in memory of its own, so that sealing a file never waits for a slot.
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

// Whether the next task is the tripwire's second look, and not to stage a chunk.
bool Engine::IsToLook(const QueuedBatch& queued) {
  return queued.looks && !queued.batch->chunks()[queued.next].eager;
}

// Whether the next chunk and all that follow are lazy, and may not be copied yet.
bool Engine::MustWait(const QueuedBatch& queued) const {
  if (IsToLook(queued) || queued.first_pass) return false;
  return queued.next >= queued.batch->eager_end() && Clock::now() < queued.lazy_from && !queued.job->failed();
}

// Returns the batch whose next chunk, or the task that comes before it, is due; the end of the queue if none
// is. That is the first in the queue, except that of lazy and appended chunks each kind is taken in turn: the
// first ones hold up the next fence, the others the thread that serializes them. A job is passed over as long
// as its sources are being looked at, or its first pass is ending. If its next chunk must wait (at most until
// `later`), only appended ones may overtake it.
std::deque<Engine::QueuedBatch>::iterator Engine::Choose(Clock::time_point* later) {
  blocked_.clear();
  auto lazy = queue_.end(), appended = queue_.end();
  for (auto at = queue_.begin(); at != queue_.end(); ++at) {
    if (std::find(blocked_.begin(), blocked_.end(), at->job.get()) != blocked_.end()) continue;
    if (at->busy || (at->first_pass && at->next == at->batch->chunks().size())) {
      blocked_.push_back(at->job.get());
    } else if (MustWait(*at)) {
      *later = std::min(*later, at->lazy_from);
    } else if (at->appended) {
      if (appended == queue_.end()) appended = at;
    } else if (!IsToLook(*at) && !at->first_pass && !at->batch->chunks()[at->next].eager) {
      if (lazy == queue_.end()) lazy = at;
    } else if (lazy == queue_.end() && appended == queue_.end()) {
      return at;
    } else {
      blocked_.push_back(at->job.get());
    }
  }
  if (lazy == queue_.end() || appended == queue_.end()) return lazy == queue_.end() ? appended : lazy;
  appended_next_ = !appended_next_;
  return appended_next_ ? lazy : appended;
}

bool Engine::TakeTask(QueuedBatch* taken, Clock::time_point* later) {
  const auto at = Choose(later);
  if (at == queue_.end()) return false;
  at->busy = IsToLook(*at);
  *taken = *at;
  if (!at->busy && ++at->next >= at->batch->chunks().size() && !at->first_pass) {
    at->job->EndTask();
    queue_.erase(at);
  }
  return true;
}

void Engine::StageLoop() {
  BeginThread("ds-stage");
  YieldToWakers();
  MutexLock lock(mutex_);
  NoteBegin(&staging_);
  while (true) {
    QueuedBatch taken;
    Clock::time_point later = Clock::time_point::max();
    if (!TakeTask(&taken, &later)) {
      if (later != Clock::time_point::max()) {
        stage_wake_.WaitUntil(mutex_, std::min(later, Clock::now() + kPollInterval));
      } else if (stop_staging_) {
        break;
      } else {
        stage_wake_.Wait(mutex_);
      }
      continue;
    }
    lock.Unlock();
    if (taken.busy) {
      Look(taken);
    } else {
      Stage(taken);
    }
    taken = QueuedBatch();
    lock.Lock();
  }
  --staging_;
  ended_.NotifyAll();
}

void Engine::Look(const QueuedBatch& queued) {
  if (queued.job->BeginRead()) {
    try {
      queued.job->Look(*queued.batch);
    } catch (const std::exception& error) {
      queued.job->FailIn("look at sources", error);
    }
    queued.job->EndRead();
  }
  const MutexLock lock(mutex_);
  const auto at = Find(queued);
  at->looks = at->busy = false;
  stage_wake_.NotifyAll();
}

// A busy batch stays in the queue: no other thread takes it.
std::deque<Engine::QueuedBatch>::iterator Engine::Find(const QueuedBatch& taken) {
  return std::find_if(queue_.begin(), queue_.end(), [&](const QueuedBatch& other) {
    return other.batch == taken.batch && other.first_pass == taken.first_pass;
  });
}

void Engine::EnterDevice(const SaveJob& job) {
  thread_local const DeviceCopier* entered = nullptr;
  if (!job.copier() || entered == job.copier().get()) return;
  job.copier()->EnterThread();
  MoveNearDevice(job);
  entered = job.copier().get();
}

// Runs this thread on the NUMA node of the slots that it reads or writes.
void Engine::MoveNearDevice(const SaveJob& job) {
  thread_local bool moved = false;
  if (!job.copier() || moved) return;
  BindThread(node_);
  moved = true;
}

// Returns the chunk's checksums if the copies have taken them, which those of a device cannot.
std::vector<BlockPart> Engine::FillSlot(const QueuedBatch& queued, const Batch::Chunk& chunk, uint8_t* target,
                                        bool* device) {
  BlockSums sums(chunk.offset, target);
  const bool is_summed = queued.job->checksums() && !chunk.device && !queued.first_pass;
  const auto copy = [&](uint8_t* to, const Span& span, uint64_t source, uint64_t bytes, uint64_t count) {
    if (!span.device) {
      const auto* from = reinterpret_cast<const uint8_t*>(source);
      if (!is_summed || bytes < kLongBytes) return CopyRows(to, bytes, from, span.row_step, bytes, count);
      for (uint64_t i = 0; i < count; ++i) sums.Copy(to + i * bytes, from + i * span.row_step, bytes);
      return;
    }
    *device = true;  // set first: some copies may be enqueued before one fails
    queued.job->copier()->CopyRows(to, source, bytes, span.row_step, count);
  };
  queued.batch->Fill(chunk, target, copy);
  return is_summed ? sums.Finish(target + chunk.bytes) : std::vector<BlockPart>();
}

void Engine::Stage(const QueuedBatch& queued) {
  SaveJob& job = *queued.job;
  const Batch::Chunk& chunk = queued.batch->chunks()[queued.next];
  FilledChunk filled{queued.job, queued.batch, queued.next, Slot(), {}};
  bool device = false, reads = false;
  try {
    filled.slot = SlotFor(job, chunk);
    reads = filled.slot && job.BeginRead();
    if (reads) {
      EnterDevice(job);
      filled.parts = FillSlot(queued, chunk, filled.slot.data(), &device);
      if (!queued.first_pass) return PassOn(&filled, device);
      if (device) job.copier()->WaitFor(job.copier()->Enqueued());
      device = false;
      job.KeepFirstChecksum(queued.next, Crc32c(0, filled.slot.data(), chunk.bytes));
    }
  } catch (const std::exception& error) {
    job.FailIn("stage", error);
  }
  // Enqueued copies still read the sources and write to the slot.
  if (device && !job.copier()->Drain()) filled.slot.Abandon();
  if (reads) job.EndRead();
  filled.slot.Return();
  if (queued.first_pass) EndFirstCopy(queued);
  job.EndTask();
}

// If this or PassToWriters throws, the chunk is still the caller's, and no read of it has ended: the caller
// waits for the device before it returns the slot. So the element of the queue, the only step that can fail,
// comes first; under the lock, no other thread finds it empty.
void Engine::PassOn(FilledChunk* filled, bool device) {
  SaveJob& job = *filled->job;
  // Read before the count, after which the next save may begin: its copies wait for the trainer.
  const DeviceCopier::Place place = device ? job.copier()->Enqueued() : 0;
  job.CountEnqueued(*filled->batch, filled->batch->chunks()[filled->chunk]);
  if (!device) return PassToWriters(filled);
  const MutexLock lock(mutex_);
  CopiedChunk& copied = in_flight_.emplace_back();
  copied.place = place;
  copied.filled = std::move(*filled);
  await_wake_.NotifyOne();
}

// Ends the read of the chunk's sources.
void Engine::PassToWriters(FilledChunk* filled) {
  const MutexLock lock(mutex_);
  FilledChunk& queued = filled_.emplace_back();
  filled->job->CountStaged(*filled->batch, filled->batch->chunks()[filled->chunk]);
  filled->job->EndRead();
  queued = std::move(*filled);
  write_wake_.NotifyOne();
}

void Engine::EndFirstCopy(const QueuedBatch& queued) {
  const MutexLock lock(mutex_);
  const auto at = Find(queued);
  if (++at->checksummed < at->batch->chunks().size()) return;
  at->job->EndTask();
  queue_.erase(at);
  stage_wake_.NotifyAll();
}

Slot Engine::SlotFor(SaveJob& job, const Batch::Chunk& chunk) {
  const auto give_up = [&job] { return job.failed(); };
  copy_rate_.Spend(chunk.bytes, give_up);
  if (job.failed()) return Slot();
  const auto before = Clock::now();
  double growing = 0;
  Slot slot = pool_->Acquire(give_up, &growing);
  job.CountSlotWait(std::chrono::duration<double>(Clock::now() - before).count(), growing);
  return slot;
}

void Engine::AwaitLoop() {
  BeginThread("ds-await");
  YieldToWakers();
  MutexLock lock(mutex_);
  NoteBegin(&awaiting_);
  while (true) {
    if (in_flight_.empty()) {
      if (stop_awaiting_) break;
      await_wake_.Wait(mutex_);
      continue;
    }
    CopiedChunk copied = std::move(in_flight_.front());
    in_flight_.pop_front();
    lock.Unlock();
    Await(&copied);
    copied = CopiedChunk();
    lock.Lock();
  }
  --awaiting_;
  ended_.NotifyAll();
}

// Also after an error, the device must be done with a slot before it is returned.
void Engine::Await(CopiedChunk* copied) {
  FilledChunk& filled = copied->filled;
  SaveJob& job = *filled.job;
  try {
    EnterDevice(job);
    job.copier()->WaitFor(copied->place);
    if (filled.batch) return PassToWriters(&filled);
  } catch (const std::exception& error) {
    job.FailIn("await copies", error);
    if (!job.copier()->Drain()) filled.batch ? filled.slot.Abandon() : sample_memory_->Abandon();
  }
  job.EndRead();
  filled.slot.Return();
  job.EndTask();
}

void Engine::WriteLoop() {
  BeginThread("ds-write");
  YieldToWakers();
  MutexLock lock(mutex_);
  NoteBegin(&writing_);
  while (true) {
    // Footers come first, so that a save does not wait for the data of the next one.
    if (const auto footer = FirstReady(footers_); footer != footers_.end()) {
      Footer taken = std::move(*footer);
      footers_.erase(footer);
      lock.Unlock();
      WriteFooter(taken);
      taken = Footer();
      lock.Lock();
    } else if (!openings_.empty()) {
      Opening taken = std::move(openings_.front());
      openings_.pop_front();
      lock.Unlock();
      OpenFile(taken);
      taken = Opening();
      lock.Lock();
    } else if (const auto chunk = FirstReady(filled_); chunk != filled_.end()) {
      FilledChunk taken = std::move(*chunk);
      filled_.erase(chunk);
      lock.Unlock();
      Write(std::move(taken));
      taken = FilledChunk();
      lock.Lock();
    } else if (!footers_.empty() || !filled_.empty()) {
      write_wake_.WaitUntil(mutex_, Clock::now() + kPollInterval);  // a job that fails wakes no thread
    } else if (stop_writing_) {
      break;
    } else {
      write_wake_.Wait(mutex_);
    }
  }
  --writing_;
  ended_.NotifyAll();
}

// Returns the first whose job has its file or has failed; the end if there is none.
template <typename Item>
typename std::deque<Item>::iterator Engine::FirstReady(std::deque<Item>& items) {
  const SaveJob* unready = nullptr;  // there are thousands of chunks, but few jobs
  return std::find_if(items.begin(), items.end(), [&](const Item& item) {
    if (item.job.get() == unready) return false;
    if (item.job->IsReadyToWrite()) return true;
    unready = item.job.get();
    return false;
  });
}

void Engine::OpenFile(const Opening& opening) {
  try {
    if (!opening.job->failed()) opening.job->Open(opening.reserve_bytes, options_.discard, &faults_);
  } catch (const std::exception& error) {
    opening.job->FailIn("open", error);
  }
  opening.job->EndTask();
  const MutexLock lock(mutex_);
  write_wake_.NotifyAll();
}

void Engine::Write(FilledChunk filled) {
  SaveJob& job = *filled.job;
  MoveNearDevice(job);
  const Batch::Chunk& chunk = filled.batch->chunks()[filled.chunk];
  try {
    if (job.writes()) write_rate_.Spend(chunk.bytes, [&job] { return job.failed(); });
    if (!job.failed() && job.Verify(*filled.batch, filled.chunk, filled.slot.data())) {
      job.WriteChunk(chunk, filled.slot.data(), std::move(filled.parts));
    }
  } catch (const std::exception& error) {
    job.FailIn("write", error);
  }
  filled.slot.Return();
  job.EndTask();
}

void Engine::WriteFooter(const Footer& footer) {
  try {
    if (!footer.job->failed()) {
      const AlignedCopy copy(footer.bytes);
      footer.job->WriteFooter(copy.data(), footer.bytes.size(), footer.offset);
    }
  } catch (const std::exception& error) {
    footer.job->FailIn("write footer", error);
  }
  footer.job->EndTask();
}

}  // namespace datastates
