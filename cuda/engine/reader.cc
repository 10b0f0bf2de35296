#include "engine/reader.h"

#include <algorithm>
#include <chrono>
#include <system_error>
#include <tuple>

#include "engine/block.h"
#include "engine/crc32c.h"
#include "engine/host_copy.h"
#include "os/threads.h"

namespace datastates {
namespace {

constexpr uint64_t kLongestCopy = uint64_t{32} << 20;
constexpr double kMostStartSeconds = 1;  // to wait for the first slot; the driver may hang

}  // namespace

Reader::Reader(const Options& options)
    : options_(options),
      faults_(options.faults),
      pool_(options.slot_bytes, 2 * static_cast<size_t>(options.threads)) {
  if (options.slot_bytes == 0 || options.slot_bytes % kBlockBytes != 0 || options.threads < 1) {
    throw Failure("start reader", "", 0,
                  "slot size must be a positive multiple of 1 MiB, found " +
                      std::to_string(options.slot_bytes) + " bytes; threads must be at least 1, found " +
                      std::to_string(options.threads));
  }
}

ReadJob::ReadJob(std::shared_ptr<Reader> reader, ReadPlan plan, CuStream trainer)
    : reader_(std::move(reader)), plan_(std::move(plan)), sources_(new Source[plan_.files().size()]) {
  const size_t threads = std::min(static_cast<size_t>(reader_->options().threads), plan_.windows().size());
  SlotPool& pool = reader_->pool();
  if (plan_.has_device_targets()) {
    copier_ = std::make_shared<DeviceCopier>(Driver::Open(reader_->options().driver), kLongestCopy);
    node_ = NodeOfDevice(reader_->options().sysfs, copier_->driver()->CurrentBusId());
    pool.Register(copier_->driver(), copier_->context(), node_);
    copier_->StartAfter(trainer);
    copier_->Hurry(true);  // the trainer waits for the load
  }
  working_ = threads;
  threads_.reserve(threads);  // while none runs
  try {
    if (threads > 0) {
      pool.Grow(std::min(plan_.windows().size(), threads * (copier_ ? 2 : 1)));
      // Checks for memory before threads take more of it. The caller handles no signals meanwhile.
      const auto deadline = DeadlineAfter(kMostStartSeconds);
      pool.Acquire([deadline] { return CondVar::Clock::now() >= deadline; }).Return();
    }
    while (threads_.size() < threads) threads_.emplace_back(&ReadJob::Work, this);
  } catch (const std::exception& error) {
    const MutexLock lock(mutex_);
    working_ -= threads - threads_.size();
    // The threads that did start do the work. An exception past them would end the process, which must not
    // destroy a running thread.
    if (!threads_.empty()) return;
    const auto* no_thread = dynamic_cast<const std::system_error*>(&error);
    if (no_thread == nullptr) throw;
    throw Failure("start reader", "thread", no_thread->code().value());
  }
}

bool ReadJob::Wait(double seconds) {
  const auto deadline = DeadlineAfter(seconds);
  const MutexLock lock(mutex_);
  while (working_ != 0) {
    if (!ended_.WaitUntil(mutex_, deadline)) return working_ == 0;
  }
  return true;
}

void ReadJob::Close() {
  stopped_ = true;
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
  reader_.reset();  // a closed job keeps no memory
}

ReadJob::Result ReadJob::result() const {
  const MutexLock lock(mutex_);
  Result result = result_;
  std::sort(result.bad_blocks.begin(), result.bad_blocks.end(), [](const BadBlock& a, const BadBlock& b) {
    return std::tie(a.file, a.block) < std::tie(b.file, b.block);
  });
  return result;
}

void ReadJob::Work() {
  BeginThread("ds-read");
  try {
    if (copier_) copier_->EnterThread();
    BindThread(node_);
    ReadWindows();
  } catch (const std::exception& error) {
    Fail(error);
  }
  const MutexLock lock(mutex_);
  --working_;
  ended_.NotifyAll();
}

void ReadJob::ReadWindows() {
  std::deque<Lent> lent;  // the first is read into next
  Opened opened{};
  try {
    while (!stopped_) {
      const size_t taken = next_++;
      if (taken >= plan_.windows().size() || !TakeSlot(&lent)) break;
      const ReadPlan::Window& window = plan_.windows()[taken];
      Open(window.file, &opened);
      uint8_t* const data = lent.front().slot.data();
      opened.file->ReadAt(data, window.begin, window.end);
      if (!Deliver(window, data)) continue;
      lent.front().copied = copier_->Enqueued();
      std::rotate(lent.begin(), lent.begin() + 1, lent.end());
    }
    // Waits for what any thread has enqueued: before that no slot is returned and the job does not end.
    if (copier_) copier_->WaitForAll();
  } catch (const std::exception& error) {
    Fail(error);
    // Copies enqueued before the error still read from the slots.
    if (copier_ && !copier_->Drain()) {
      for (Lent& one : lent) one.slot.Abandon();
    }
  }
}

void ReadJob::Open(size_t file, Opened* opened) {
  if (opened->file && opened->number == file) return;
  opened->file.reset();
  Source& source = sources_[file];
  const MutexLock lock(source.mutex);
  opened->file = source.open.lock();
  if (!opened->file) {
    const ReadFile& named = plan_.files()[file];
    const bool direct = reader_->options().direct && !named.through_cache;
    opened->file = std::make_shared<InputFile>(named.path, direct, reader_->faults());
    source.open = opened->file;
  }
  opened->number = file;
}

// Puts a slot that no device copies from in front. Returns false if the job is over.
bool ReadJob::TakeSlot(std::deque<Lent>* lent) {
  SlotPool& pool = reader_->pool();
  if (lent->empty()) {
    if (Slot slot = pool.Acquire([this] { return stopped_.load(); })) lent->push_back({std::move(slot), {}});
    return !lent->empty();
  }
  if (lent->front().copied && lent->size() == 1) {
    if (Slot slot = pool.Acquire([] { return true; })) lent->push_front({std::move(slot), {}});
  }
  if (lent->front().copied) copier_->WaitFor(*lent->front().copied);
  lent->front().copied.reset();
  return true;
}

// Returns whether the block matches its checksum, or the file has none.
bool ReadJob::Check(const ReadPlan::Window& window, uint64_t begin, uint64_t end, const uint8_t* data) {
  const std::vector<uint32_t>& checksums = plan_.files()[window.file].checksums;
  if (checksums.empty() || Crc32c(0, data, end - begin) == checksums[begin / kBlockBytes]) return true;
  const MutexLock lock(mutex_);
  result_.bad_blocks.push_back({window.file, begin / kBlockBytes});
  return false;
}

// Works block by block, while a block is in the caches. Returns whether copies to a device were enqueued.
bool ReadJob::Deliver(const ReadPlan::Window& window, const uint8_t* data) {
  bool device = false;
  const auto copy = [&](const ReadSpan& span, uint64_t target, const uint8_t* source, uint64_t bytes,
                        uint64_t rows) {
    if (span.device) {
      device = true;
      copier_->CopyToDevice(target, span.target_step, source, span.file_step, bytes, rows);
    } else {
      CopyRows(reinterpret_cast<uint8_t*>(target), span.target_step, source, span.file_step, bytes, rows);
    }
  };
  for (uint64_t at = window.begin; at < window.end; at += kBlockBytes) {
    const uint64_t end = std::min(at + kBlockBytes, window.end);
    const uint8_t* const block = data + (at - window.begin);
    if (Check(window, at, end, block)) plan_.Deliver(window, at, end, block, copy);
  }
  const MutexLock lock(mutex_);
  result_.bytes_read += window.end - window.begin;
  return device;
}

// Any other exception than a Failure means that memory or a thread is lacking.
void ReadJob::Fail(const std::exception& error) noexcept {
  stopped_ = true;
  const MutexLock lock(mutex_);
  if (result_.failure) return;
  try {
    const auto* failure = dynamic_cast<const Failure*>(&error);
    result_.failure.emplace(failure != nullptr ? *failure : Failure("read", "", 0, error.what()));
  } catch (const std::bad_alloc&) {
    result_.failure.emplace(std::move(spare_failure_));
  }
}

}  // namespace datastates
