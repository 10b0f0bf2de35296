#include "engine/save_job.h"

#include <unistd.h>

#include <algorithm>
#include <utility>

#include "engine/crc32c.h"
#include "os/aligned.h"

namespace datastates {
namespace {

constexpr const char* kOfTheParent =
    "this save belongs to the parent of this process; a forked child cannot use it";

}  // namespace

SaveJob::SaveJob(std::string path, bool direct, bool checksums, Output output,
                 std::shared_ptr<DeviceCopier> copier)
    : path_(std::move(path)),
      direct_(direct),
      checksums_(checksums && output != Output::kDigests),
      output_(output),
      copier_(std::move(copier)) {}

bool SaveJob::Reached(Milestone milestone) const {
  if (milestone == Milestone::kReleased) return tasks_ == 0;
  if (failure_) return milestone != Milestone::kStaged || reads_ == 0;
  switch (milestone) {
    case Milestone::kEager:
      return eager_left_ == 0;
    case Milestone::kEnqueued:
      return enqueued_left_ == 0;
    case Milestone::kStaged:
      return staged_left_ == 0;
    case Milestone::kAppended:
      return appended_left_ == 0;
    case Milestone::kWritten:
      return input_closed_ && written_left_ == 0;
    default:
      return durable_;
  }
}

bool SaveJob::Wait(Milestone milestone, double seconds) {
  if (!home_.IsHere()) return true;
  MutexLock lock(mutex_);
  if (seconds <= 0) return Reached(milestone);
  const auto deadline = DeadlineAfter(seconds);
  while (!Reached(milestone)) {
    if (!changed_.WaitUntil(mutex_, deadline)) return Reached(milestone);
  }
  return true;
}

template <typename Make>
void SaveJob::FailWith(Make make) noexcept {
  if (!home_.IsHere()) return;
  const MutexLock lock(mutex_);
  if (durable_) return;  // the file is complete already
  try {
    if (!failure_) failure_.emplace(make());
  } catch (const std::bad_alloc&) {
    failure_.emplace(std::move(spare_failure_));
  }
  changed_.NotifyAll();
}

void SaveJob::FailIn(const char* operation, const std::exception& error) noexcept {
  const auto* failure = dynamic_cast<const Failure*>(&error);
  FailWith([&] { return failure != nullptr ? *failure : Failure(operation, "", 0, error.what()); });
}

void SaveJob::Cancel(const char* reason) noexcept {
  if (!home_.IsHere()) return;
  FailWith([&] { return Failure("cancelled", "", 0, reason); });
  const MutexLock lock(mutex_);
  status_.cancelled = true;
}

bool SaveJob::failed() const {
  if (!home_.IsHere()) return true;
  const MutexLock lock(mutex_);
  return failure_.has_value();
}

SaveJob::Status SaveJob::status() const {
  Status status;
  if (!home_.IsHere()) {
    status.failure = Failure(kOfTheParent, "", 0);
    return status;
  }
  const MutexLock lock(mutex_);
  status = status_;
  status.failure = failure_;
  if (file_ != nullptr) status.direct = file_->direct();
  return status;
}

void SaveJob::HoldBack(CuStream trainer) {
  if (!home_.IsHere() || !copier_) return;
  try {
    const ContextScope scope(*copier_->driver(), copier_->context());
    const auto record = [&] {
      auto event = std::make_unique<Event>(copier_->driver(), copier_->context(), true);
      copier_->driver()->Record(event->get(), trainer);
      return event;
    };
    Hold hold;
    hold.begin = record();
    copier_->HoldBack(trainer);
    hold.end = record();
    const MutexLock lock(holding_);
    holds_.push_back(std::move(hold));
  } catch (const std::exception& error) {
    FailIn("hold back", error);  // the trainer must not see it; what it does next may tear the copies
  }
}

double SaveJob::StreamWaited() {
  if (!home_.IsHere() || !copier_) return 0;
  const ContextScope scope(*copier_->driver(), copier_->context());
  const RelaxedCapture relaxed(*copier_->driver());
  const MutexLock lock(holding_);
  try {
    while (!holds_.empty() && copier_->driver()->Done(holds_.front().end->get())) {
      const auto& [begin, end] = holds_.front();
      stream_waited_ += 1e-3 * copier_->driver()->MillisecondsBetween(begin->get(), end->get());
      holds_.erase(holds_.begin());
    }
  } catch (const std::exception&) {
    holds_.clear();  // this is only a measurement; the calls that copy report a broken device
  }
  return stream_waited_;
}

bool SaveJob::TakeSamples(const Batch& batch, std::shared_ptr<uint8_t> device_memory) {
  const bool device = device_memory != nullptr;
  try {
    tripwire_.emplace();
    tripwire_->Take(batch, copier_.get(), std::move(device_memory));
  } catch (const std::exception& error) {
    FailIn("take samples", error);
  }
  return device;
}

bool SaveJob::BeginRead() {
  const MutexLock lock(mutex_);
  if (failure_) return false;
  ++reads_;
  return true;
}

void SaveJob::EndRead() {
  const MutexLock lock(mutex_);
  --reads_;
  changed_.NotifyAll();
}

void SaveJob::MakeRoomForFirstPass(const Batch& batch) {
  const MutexLock lock(mutex_);
  first_checksums_.resize(batch.chunks().size());
}

void SaveJob::CountFirstPass(const Batch& batch) {
  const MutexLock lock(mutex_);
  eager_left_ += batch.chunks().size();
  tasks_ += batch.chunks().size();
}

void SaveJob::KeepFirstChecksum(size_t chunk, uint32_t crc) {
  const MutexLock lock(mutex_);
  first_checksums_[chunk] = crc;
  --eager_left_;
  changed_.NotifyAll();
}

void SaveJob::Look(const Batch& batch) {
  if (!tripwire_) return;
  tripwire_->Look(batch, [this] { return failed(); });
  const MutexLock lock(mutex_);
  status_.looked_at = Elapsed();
}

bool SaveJob::Verify(const Batch& batch, size_t number, const uint8_t* staged) {
  if (!batch.fenced()) return true;
  const Batch::Chunk& chunk = batch.chunks()[number];
  if (tripwire_) {
    if (const auto change = tripwire_->FindChange(batch, number, staged)) {
      FailTorn(change->offset, change->bytes);
      return false;
    }
  }
  std::optional<uint32_t> crc;
  {
    const MutexLock lock(mutex_);
    if (!first_checksums_.empty()) crc = first_checksums_[number];
  }
  if (!crc || *crc == Crc32c(0, staged, chunk.bytes)) return true;
  FailTorn(chunk.offset, chunk.bytes);
  return false;
}

void SaveJob::FailTorn(uint64_t offset, uint64_t bytes) {
  const MutexLock lock(mutex_);
  if (failure_) return;
  failure_ = FileFailure("stage", path_, 0,
                         "the source of offset " + std::to_string(offset) +
                             " changed before its copy was done, so the copy mixes two states");
  status_.torn_at = offset;
  status_.torn_bytes = bytes;
  changed_.NotifyAll();
}

void SaveJob::CountPlanned(const Batch& batch) {
  const MutexLock lock(mutex_);
  for (const Batch::Chunk& chunk : batch.chunks()) {
    eager_left_ += chunk.eager;
    status_.bytes_planned += chunk.bytes;
  }
  const size_t chunks = batch.chunks().size();
  if (batch.fenced()) {
    enqueued_left_ += chunks;
    staged_left_ += chunks;
  } else {
    appended_left_ += chunks;
  }
  written_left_ += chunks;
  tasks_ += chunks;
}

void SaveJob::CloseInput() {
  if (!home_.IsHere()) return;
  const MutexLock lock(mutex_);
  input_closed_ = true;
  if (written_left_ == 0) status_.written_at = Elapsed();
  changed_.NotifyAll();
}

void SaveJob::BeginTask() {
  const MutexLock lock(mutex_);
  ++tasks_;
}

void SaveJob::EndTask() {
  std::optional<Tripwire> dropped;  // destroyed after the lock is released
  const MutexLock lock(mutex_);
  if (--tasks_ == 0) dropped.swap(tripwire_);  // every fenced chunk has been verified, or never will be
  changed_.NotifyAll();
}

void SaveJob::Open(uint64_t reserve_bytes, bool discard, Faults* faults) {
  auto file = std::make_unique<DataFile>(path_, direct_, discard, faults);
  DataFile* const opened = file.get();
  {
    const MutexLock lock(mutex_);
    file_ = std::move(file);  // kept now, so that Remove finds it if reserving fails
  }
  opened->Reserve(reserve_bytes);
  const MutexLock lock(mutex_);
  status_.reserved_at = Elapsed();
}

bool SaveJob::IsReadyToWrite() const {
  const MutexLock lock(mutex_);
  return status_.reserved_at >= 0 || failure_ || !writes();
}

void SaveJob::CountEnqueued(const Batch& batch, const Batch::Chunk& chunk) {
  const MutexLock lock(mutex_);
  if (chunk.eager) --eager_left_;
  if (batch.fenced()) --enqueued_left_;
  if (enqueued_left_ == 0 && status_.enqueued_at < 0) status_.enqueued_at = Elapsed();
  changed_.NotifyAll();
}

void SaveJob::CountStaged(const Batch& batch, const Batch::Chunk& chunk) {
  const MutexLock lock(mutex_);
  --(batch.fenced() ? staged_left_ : appended_left_);
  status_.bytes_staged += chunk.bytes;
  if (staged_left_ == 0 && status_.staged_at < 0) status_.staged_at = Elapsed();
  changed_.NotifyAll();
}

DataFile* SaveJob::file() const {
  const MutexLock lock(mutex_);
  return file_.get();
}

void SaveJob::WriteChunk(const Batch::Chunk& chunk, const uint8_t* data, std::vector<BlockPart> parts) {
  if (checksums_ && parts.empty()) parts = BlockSums(chunk.offset, data).Finish(data + chunk.bytes);
  if (output_ != Output::kFile) TakeDigests(chunk, data);
  if (writes()) {
    DataFile* const open = file();
    if (open == nullptr) throw FileFailure("write", path_, 0, "the file is closed");
    open->WriteAt(data, chunk.bytes, chunk.offset);
  }
  const MutexLock lock(mutex_);
  block_parts_.insert(block_parts_.end(), parts.begin(), parts.end());
  if (writes()) status_.bytes_written += chunk.bytes;
  if (--written_left_ == 0 && input_closed_) status_.written_at = Elapsed();
  changed_.NotifyAll();
}

void SaveJob::TakeDigests(const Batch::Chunk& chunk, const uint8_t* data) {
  const uint64_t first = chunk.offset / kBlockBytes;
  std::vector<Sha256Digest> digests;
  for (uint64_t at = 0; at < chunk.bytes; at += kBlockBytes) {
    const uint64_t end = std::min(chunk.bytes, at + kBlockBytes);
    const uint64_t begin = chunk.offset + at == 0 ? kHeaderBytes : at;
    digests.push_back(Sha256(data + begin, end - begin));
  }
  const MutexLock lock(mutex_);
  if (block_digests_.size() < first + digests.size()) block_digests_.resize(first + digests.size());
  std::copy(digests.begin(), digests.end(), block_digests_.begin() + static_cast<ptrdiff_t>(first));
}

std::vector<uint8_t> SaveJob::BlockDigests() const {
  if (!home_.IsHere()) throw FileFailure("collect digests", path_, 0, kOfTheParent);
  std::vector<uint8_t> all;
  const MutexLock lock(mutex_);
  for (const auto& digest : block_digests_) {
    if (!digest) throw FileFailure("collect digests", path_, 0, "a chunk is missing");
    all.insert(all.end(), digest->begin(), digest->end());
  }
  return all;
}

std::vector<uint32_t> SaveJob::BlockChecksums() const {
  if (!home_.IsHere()) throw FileFailure("collect checksums", path_, 0, kOfTheParent);
  std::vector<BlockPart> parts;
  {
    const MutexLock lock(mutex_);
    parts = block_parts_;
  }
  std::sort(parts.begin(), parts.end(),
            [](const BlockPart& a, const BlockPart& b) { return a.offset < b.offset; });
  std::vector<uint32_t> blocks;
  uint64_t end = 0;
  for (const BlockPart& part : parts) {
    if (part.offset != end) throw FileFailure("collect checksums", path_, 0, "a chunk is missing");
    if (part.offset % kBlockBytes == 0) {
      blocks.push_back(part.crc);
    } else {
      blocks.back() = Crc32cCombine(blocks.back(), part.crc, part.bytes);
    }
    end = part.offset + part.bytes;
  }
  return blocks;
}

void SaveJob::WriteFooter(const uint8_t* data, uint64_t bytes, uint64_t offset) {
  DataFile* const open = file();
  if (open == nullptr) throw FileFailure("write footer", path_, 0, "the file was never opened");
  if (open->discards()) {
    throw FileFailure("write footer", path_, 0,
                      "the option 'discard' stores nothing, so no file can be finished; it serves only to "
                      "measure copies. Leave it out");
  }
  open->WriteAt(data, bytes, offset);
  open->Truncate(offset + bytes);
  open->Sync();
  std::unique_ptr<DataFile> closed;  // destroyed after the lock is released: closing may take long
  const MutexLock lock(mutex_);
  if (failure_) return;  // cancelled in the meantime: the canceller must not find the file durable
  durable_ = true;
  status_.durable_at = Elapsed();
  status_.direct = file_->direct();
  closed = std::move(file_);
  changed_.NotifyAll();
}

void SaveJob::CountSlotWait(double seconds, double while_growing) {
  const MutexLock lock(mutex_);
  status_.waited_for_slots += seconds;
  status_.waited_for_memory += while_growing;
}

void SaveJob::Remove() {
  if (!home_.IsHere()) return;
  std::unique_ptr<DataFile> closed;
  {
    const MutexLock lock(mutex_);
    if (file_ == nullptr && !durable_) return;  // never made, or removed before
    closed = std::move(file_);
  }
  const bool is_named = closed == nullptr || closed->IsAtItsName();
  closed.reset();  // before the name goes: NFS would keep an open file under another one
  if (is_named) unlink(path_.c_str());
}

}  // namespace datastates
