// memfit's CPU allocator under torch: exact counts, a hard limit, a bounded pool.
//
// In: torch asks c10's CPU allocator for bytes. Out: bytes, counted per ledger. Python drives it through the C
// functions at the end.
//
// [Note: what is counted]
//   live    the bytes that torch asked for and has not freed
//   mapped  what the process really holds for them: block sizes rounded up, plus pooled blocks
//   pooled  freed large blocks kept for reuse (part of mapped)
// The limit is on mapped, so that the peak of the process follows it. Bytes become mapped before the system call that
// takes them and cease to be after the one that gives them back: the count is never below the truth.
//
// [Note: the pool costs nothing]
// Freed large blocks are kept where the process will need their bytes again anyway: used bytes (mapped without the pool)
// and pool together stay below the most that was used since the last trim. A new mapping that would pass that has the
// oldest pooled bytes go first. So the peak of the process is that of its use, and below it nothing is unmapped: fresh
// pages cost 2.5 GB/s (10 as huge pages) where a pooled block is written at 17.
//
// [Note: parts of pooled blocks]
// A step frees blocks of other sizes than it asks for next. So a request takes the first part of the smallest pooled
// block that holds it, and freed blocks that touch become one: pages are used again whatever they were cut into before.
// What goes back to the system is cut off the end, at a huge page where there is one, so that none is split in two.
//
// [Note: which free]
// The context of a DataPtr is the data pointer itself, so that c10's raw_allocate/raw_deallocate work too. A free tells
// small from large blocks by address: large ones are page-aligned and stand in a table; small ones have a header of 16
// bytes before the data. A small block can be page-aligned by accident; it is then not in the table.
//
// [Note: fork]
// One mutex guards all counts; pthread_atfork handlers take it around fork, so that a child never inherits it locked. A
// child goes on with its copy of the counts and the limit; its frees do not change the parent's.

#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>
#ifdef __GLIBC__
#include <malloc.h>
#endif

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iomanip>
#include <iterator>
#include <limits>
#include <list>
#include <map>
#include <mutex>
#include <new>
#include <sstream>
#include <string>
#include <unordered_map>

namespace {

constexpr std::size_t kSmallAlignment = 64;  // c10's gAlignment: vector kernels count on it
constexpr std::size_t kHugePage = std::size_t{2} << 20;
// From here on blocks come by mmap and are pooled. glibc would use mmap for them as well (install sets its threshold to
// the same value), but would unmap every one when it is freed and pay the page faults again.
constexpr std::size_t kLargeBytes = std::size_t{128} << 10;
constexpr std::size_t kMallocOverhead = 8;
constexpr std::uint32_t kGuard = 0x6d656d66;
constexpr std::int64_t kNoLimit = -1;
// A small block must not drive out a large pooled one for want of a few bytes.
constexpr std::int64_t kPoolSlack = std::int64_t{2} << 20;
constexpr int kLedgers = 2;

struct Account {
  std::int64_t live = 0, peak = 0, mapped = 0, mapped_peak = 0, pooled = 0, blocks = 0, allocations = 0,
               used_peak = 0, watched_peak = 0;
  std::int64_t limit = kNoLimit;

  std::int64_t used() const {
    return mapped - pooled;
  }
};

struct Header {
  std::uint64_t bytes;
  std::uint32_t guard;
  std::uint16_t raw_offset;
  std::uint16_t ledger;
};
static_assert(sizeof(Header) == 16, "the data of a small block starts at most 64 bytes after what malloc gave");

struct Large {
  std::size_t bytes, mapped;
  int ledger;
};

struct Pooled {
  char* address;
  std::size_t mapped;
  int ledger;

  char* end() const {
    return address + mapped;
  }
};
using PooledBlock = std::list<Pooled>::iterator;

struct State {
  std::mutex mutex;
  Account accounts[kLedgers];
  std::unordered_map<void*, Large> large;
  std::list<Pooled> pool;  // oldest first
  std::multimap<std::size_t, PooledBlock> pool_by_size[kLedgers];
  std::map<char*, PooledBlock> pool_by_address;
  std::int64_t pool_bytes = 0;
  std::int64_t pool_limit = kNoLimit;

  std::int64_t above_pool_limit() const {
    return pool_limit == kNoLimit ? 0 : pool_bytes - pool_limit;
  }
  std::size_t page = 4096;
};

// Never destroyed: torch frees storages after static destructors have run.
State& state() {
  static State* const the_state = new State();
  return *the_state;
}

thread_local int t_ledger = 0;

using Lock = std::unique_lock<std::mutex>;

std::size_t round_up(std::size_t n, std::size_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

// What glibc takes for a small block: 64 bytes for header and alignment, its own word, steps of 16.
std::size_t small_mapped(std::size_t n) {
  return round_up(n + kSmallAlignment + kMallocOverhead, 16);
}

void unmap_pages(void* address, std::size_t bytes) {
  // munmap can fail only where it would split a mapping past vm.max_map_count; the pages can still be given back.
  if (munmap(address, bytes) != 0) {
    madvise(address, bytes, MADV_DONTNEED);
  }
}

// Fresh pages; from 2 MiB on they start at a huge page, and only whole huge pages inside the block are marked, so that
// huge pages neither inflate a block beyond its size nor straddle two blocks. Null (errno set) where the system
// refuses.
void* map_pages(std::size_t bytes) {
  if (bytes < kHugePage) {
    void* const got = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return got == MAP_FAILED ? nullptr : got;
  }
  // PROT_NONE first: the spare 2 MiB for alignment must not count towards RLIMIT_DATA.
  const std::size_t wide = bytes + kHugePage;
  void* const got = mmap(nullptr, wide, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (got == MAP_FAILED) {
    return nullptr;
  }
  char* const start = static_cast<char*>(got);
  char* const aligned = reinterpret_cast<char*>(round_up(reinterpret_cast<std::uintptr_t>(start), kHugePage));
  if (aligned != start) {
    munmap(start, static_cast<std::size_t>(aligned - start));
  }
  if (aligned + bytes != start + wide) {
    munmap(aligned + bytes, static_cast<std::size_t>(start + wide - aligned - bytes));
  }
  if (mprotect(aligned, bytes, PROT_READ | PROT_WRITE) != 0) {
    const int reason = errno;
    munmap(aligned, bytes);
    errno = reason;
    return nullptr;
  }
#ifdef MADV_HUGEPAGE
  madvise(aligned, bytes / kHugePage * kHugePage, MADV_HUGEPAGE);  // advice: a kernel without huge pages may decline
#endif
  return aligned;
}

void count_live(Account& account, std::size_t bytes) {
  account.live += static_cast<std::int64_t>(bytes);
  account.blocks += 1;
  account.allocations += 1;
  if (account.live > account.peak) {
    account.peak = account.live;
  }
  if (account.live > account.watched_peak) {
    account.watched_peak = account.live;
  }
}

void uncount_live(Account& account, std::size_t bytes) {
  account.live -= static_cast<std::int64_t>(bytes);
  account.blocks -= 1;
}

void forget_size(State& s, PooledBlock block) {
  auto& by_size = s.pool_by_size[block->ledger];
  const auto range = by_size.equal_range(block->mapped);
  for (auto it = range.first; it != range.second; ++it) {
    if (it->second == block) {
      by_size.erase(it);
      return;
    }
  }
}

void count_pooled(State& s, int ledger, std::int64_t bytes) {
  s.pool_bytes += bytes;
  s.accounts[ledger].pooled += bytes;
}

// Takes a block out of the pool; its bytes stay mapped until the caller has unmapped them and says so.
Pooled pool_remove(State& s, PooledBlock block) {
  const Pooled taken = *block;
  forget_size(s, block);
  s.pool_by_address.erase(taken.address);
  s.pool.erase(block);
  count_pooled(s, taken.ledger, -static_cast<std::int64_t>(taken.mapped));
  return taken;
}

// Puts a block into the pool as the latest, together with the pooled blocks of its ledger that it touches.
void pool_insert(State& s, Pooled block) {
  const auto after = s.pool_by_address.find(block.end());
  if (after != s.pool_by_address.end() && after->second->ledger == block.ledger) {
    block.mapped += pool_remove(s, after->second).mapped;
  }
  const auto next = s.pool_by_address.lower_bound(block.address);
  if (next != s.pool_by_address.begin()) {
    const PooledBlock before = std::prev(next)->second;
    if (before->end() == block.address && before->ledger == block.ledger) {
      const Pooled taken = pool_remove(s, before);
      block.address = taken.address;
      block.mapped += taken.mapped;
    }
  }
  s.pool.push_back(block);
  const PooledBlock entry = std::prev(s.pool.end());
  s.pool_by_size[block.ledger].emplace(block.mapped, entry);
  s.pool_by_address.emplace(block.address, entry);
  count_pooled(s, block.ledger, static_cast<std::int64_t>(block.mapped));
}

// Takes the first bytes of a pooled block out of the pool; the rest stays, as old as it was. At most all of it.
void* pool_take_first(State& s, PooledBlock block, std::size_t bytes) {
  char* const address = block->address;
  if (bytes == block->mapped) {
    pool_remove(s, block);
    return address;
  }
  forget_size(s, block);
  s.pool_by_address.erase(address);
  block->address += bytes;
  block->mapped -= bytes;
  s.pool_by_size[block->ledger].emplace(block->mapped, block);
  s.pool_by_address.emplace(block->address, block);
  count_pooled(s, block->ledger, -static_cast<std::int64_t>(bytes));
  return address;
}

// Takes at least so many bytes from the end of a pooled block out of the pool, or all of it. See [Note: parts of
// pooled blocks].
Pooled pool_take_last(State& s, PooledBlock block, std::size_t bytes) {
  if (bytes >= block->mapped) {
    return pool_remove(s, block);
  }
  const auto cut = reinterpret_cast<std::uintptr_t>(block->end() - bytes) / kHugePage * kHugePage;
  char* const from = reinterpret_cast<char*>(cut);
  if (from <= block->address) {
    return pool_remove(s, block);
  }
  const Pooled taken{from, static_cast<std::size_t>(block->end() - from), block->ledger};
  forget_size(s, block);
  block->mapped -= taken.mapped;
  s.pool_by_size[block->ledger].emplace(block->mapped, block);
  count_pooled(s, block->ledger, -static_cast<std::int64_t>(taken.mapped));
  return taken;
}

// Unmaps pooled bytes, of the oldest block first, while `excess` gives more than 0. ledger -1 means any. Returns the
// bytes given back. The mutex is open during the system call: it can take milliseconds for large blocks.
template <typename Excess>
std::int64_t evict(State& s, Lock& lock, int ledger, Excess excess) {
  std::int64_t given_back = 0;
  for (std::int64_t more = excess(); more > 0; more = excess()) {
    auto oldest = s.pool.begin();
    while (oldest != s.pool.end() && ledger >= 0 && oldest->ledger != ledger) {
      ++oldest;
    }
    if (oldest == s.pool.end()) {
      break;
    }
    const Pooled victim = pool_take_last(s, oldest, static_cast<std::size_t>(more));
    lock.unlock();
    unmap_pages(victim.address, victim.mapped);
    lock.lock();
    s.accounts[victim.ledger].mapped -= static_cast<std::int64_t>(victim.mapped);
    given_back += static_cast<std::int64_t>(victim.mapped);
  }
  return given_back;
}

// Bytes by which the ledger would pass the peak of its use with `more` mapped. See [Note: the pool costs nothing].
std::int64_t above_peak(const Account& account, std::size_t more) {
  const auto wanted = static_cast<std::int64_t>(more);
  const std::int64_t above =
      account.mapped + wanted - std::max(account.used_peak, account.used() + wanted) - kPoolSlack;
  return std::min(above, account.pooled);
}

std::int64_t above_limit(const Account& account, std::size_t more) {
  return account.limit == kNoLimit ? 0 : account.mapped + static_cast<std::int64_t>(more) - account.limit;
}

// Counts `more` bytes as mapped, after emptying as much of the pool as that takes. False where the limit forbids it.
bool reserve(State& s, Lock& lock, int ledger, std::size_t more) {
  Account& account = s.accounts[ledger];
  evict(s, lock, ledger, [&] { return std::max(above_limit(account, more), above_peak(account, more)); });
  if (above_limit(account, more) > 0) {
    return false;
  }
  account.mapped += static_cast<std::int64_t>(more);
  account.used_peak = std::max(account.used_peak, account.used());
  if (account.mapped > account.mapped_peak) {
    account.mapped_peak = account.mapped;
  }
  return true;
}

std::int64_t all_of_it() {
  return std::numeric_limits<std::int64_t>::max();
}

// An amount for people: "1.5 MiB", and below one of these "512.0 KiB".
std::string amount(std::int64_t bytes) {
  const bool is_small = bytes < (std::int64_t{1} << 20);
  std::ostringstream text;
  text << std::fixed << std::setprecision(1) << static_cast<double>(bytes) / static_cast<double>(is_small ? 1 << 10 : 1 << 20)
       << (is_small ? " KiB" : " MiB");
  return text.str();
}

// The last line is for `binding.shortfall_bytes` and `kernel.refusal_words`, which compute with it: torch hands the words
// of an error to Python and nothing else.
std::string limit_message(const Account& account, int ledger, std::size_t requested) {
  const bool is_device = ledger == 0;
  std::ostringstream text;
  text << "memfit: " << amount(static_cast<std::int64_t>(requested)) << " more would pass "
       << (is_device ? "the limit: of the " : "the limit of host memory: of the ") << amount(account.limit)
       << (is_device ? " that it leaves for tensors " : " there ") << amount(account.mapped) << " are taken, "
       << amount(account.live) << " of them by tensors that are alive.\n"
       << "Nothing was allocated. Free tensors of your own or make a smaller one here, or raise "
       << (is_device ? "the limit (fit(limit=...), job.set_limit(...)).\n" : "fit(host_limit=...).\n") << "In bytes: requested "
       << requested << ", mapped " << account.mapped << ", limit " << account.limit;
  return text.str();
}

std::string system_message(const Account& account, int ledger, std::size_t requested, int reason) {
  std::ostringstream text;
  text << "memfit: the system gives no more memory (" << std::strerror(reason) << "): "
       << amount(static_cast<std::int64_t>(requested)) << " more were asked for, tensors " << (ledger == 0 ? "" : "in host memory ")
       << "hold " << amount(account.mapped) << ".\n"
       << "Nothing was allocated. Free tensors or end other programs; `ulimit -a` and `free -m` show where the bound is";
  return text.str();
}

// Maps `mapped` bytes that are already reserved; gives up the whole pool before it gives up. Null with the reservation
// undone.
void* map_reserved(State& s, int ledger, std::size_t mapped, int* reason) {
  void* address = map_pages(mapped);
  *reason = errno;
  if (address == nullptr) {
    Lock lock(s.mutex);
    const bool gave = evict(s, lock, -1, all_of_it) > 0;
    lock.unlock();
    if (gave) {
      address = map_pages(mapped);
      *reason = errno;
    }
    if (address == nullptr) {
      lock.lock();
      s.accounts[ledger].mapped -= static_cast<std::int64_t>(mapped);
    }
  }
  return address;
}

[[noreturn]] void refuse(const std::string& message, std::size_t requested) {
  c10::profiledCPUMemoryReporter().OutOfMemory(requested);
  TORCH_CHECK_WITH(OutOfMemoryError, false, message);
  std::abort();  // not reached: the line above throws
}

void* allocate_large(State& s, std::size_t n, int ledger) {
  const std::size_t need = round_up(n, s.page);
  Lock lock(s.mutex);
  Account& account = s.accounts[ledger];
  auto& by_size = s.pool_by_size[ledger];
  const auto fit = by_size.lower_bound(need);
  if (fit != by_size.end()) {
    // Of the blocks of the best size the latest freed: its pages are the likeliest in cache.
    const PooledBlock block = std::prev(by_size.upper_bound(fit->first))->second;
    void* const address = pool_take_first(s, block, need);
    s.large.emplace(address, Large{n, need, ledger});
    count_live(account, n);
    account.used_peak = std::max(account.used_peak, account.used());
    return address;
  }
  if (!reserve(s, lock, ledger, need)) {
    const std::string message = limit_message(account, ledger, n);
    lock.unlock();
    refuse(message, n);
  }
  lock.unlock();
  int reason = 0;
  void* const address = map_reserved(s, ledger, need, &reason);
  lock.lock();
  if (address == nullptr) {
    const std::string message = system_message(account, ledger, n, reason);
    lock.unlock();
    refuse(message, n);
  }
  s.large.emplace(address, Large{n, need, ledger});
  count_live(account, n);
  return address;
}

void* allocate_small(State& s, std::size_t n, int ledger) {
  const std::size_t mapped = small_mapped(n);
  Lock lock(s.mutex);
  Account& account = s.accounts[ledger];
  if (!reserve(s, lock, ledger, mapped)) {
    const std::string message = limit_message(account, ledger, n);
    lock.unlock();
    refuse(message, n);
  }
  count_live(account, n);
  lock.unlock();
  char* const raw = static_cast<char*>(std::malloc(n + kSmallAlignment));
  if (raw == nullptr) {
    lock.lock();
    uncount_live(account, n);
    account.allocations -= 1;
    account.mapped -= static_cast<std::int64_t>(mapped);
    const std::string message = system_message(account, ledger, n, ENOMEM);
    lock.unlock();
    refuse(message, n);
  }
  const auto start = reinterpret_cast<std::uintptr_t>(raw) + sizeof(Header);
  char* const data = reinterpret_cast<char*>(round_up(start, kSmallAlignment));
  const auto raw_offset = static_cast<std::uint16_t>(data - raw);
  new (data - sizeof(Header)) Header{n, kGuard, raw_offset, static_cast<std::uint16_t>(ledger)};
  return data;
}

// True where `data` was a large block.
bool free_large(State& s, void* data) {
  Lock lock(s.mutex);
  const auto found = s.large.find(data);
  if (found == s.large.end()) {
    return false;
  }
  const Large block = found->second;
  s.large.erase(found);
  Account& account = s.accounts[block.ledger];
  uncount_live(account, block.bytes);
  const auto mapped = static_cast<std::int64_t>(block.mapped);
  if ((s.pool_limit != kNoLimit && mapped > s.pool_limit) || above_limit(account, 0) > 0) {
    lock.unlock();
    unmap_pages(data, block.mapped);
    lock.lock();
    account.mapped -= mapped;
    return true;
  }
  pool_insert(s, Pooled{static_cast<char*>(data), block.mapped, block.ledger});
  evict(s, lock, -1, [&] { return s.above_pool_limit(); });
  evict(s, lock, block.ledger, [&] { return above_peak(account, 0); });
  return true;
}

void free_block(void* data) {
  if (data == nullptr) {
    return;
  }
  c10::profiledCPUMemoryReporter().Delete(data);
  State& s = state();
  if (reinterpret_cast<std::uintptr_t>(data) % 4096 == 0 && free_large(s, data)) {
    return;
  }
  const Header header = *reinterpret_cast<Header*>(static_cast<char*>(data) - sizeof(Header));
  if (header.guard != kGuard) {
    std::fprintf(stderr, "memfit: the header of the block at %p is damaged: something wrote before its tensor\n", data);
    std::abort();
  }
  std::free(static_cast<char*>(data) - header.raw_offset);
  Lock lock(s.mutex);
  Account& account = s.accounts[header.ledger];
  uncount_live(account, header.bytes);
  account.mapped -= static_cast<std::int64_t>(small_mapped(header.bytes));
}

struct MemfitAllocator final : c10::Allocator {
  c10::DataPtr allocate(std::size_t n) override {
    void* data = nullptr;
    if (n > 0) {
      State& s = state();
      if (n > (SIZE_MAX >> 2)) {
        refuse("memfit: an allocation of " + std::to_string(n) + " bytes is larger than any address space", n);
      }
      const int ledger = t_ledger;
      data = n >= kLargeBytes ? allocate_large(s, n, ledger) : allocate_small(s, n, ledger);
      c10::profiledCPUMemoryReporter().New(data, n);
    }
    return {data, data, &free_block, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &free_block;
  }
  void copy_data(void* to, const void* from, std::size_t count) const override {
    default_copy_data(to, from, count);
  }
};

void before_fork() {
  state().mutex.lock();
}
void after_fork() {
  state().mutex.unlock();
}

bool is_ledger(int ledger) {
  return ledger >= 0 && ledger < kLedgers;
}

}  // namespace

extern "C" {

// The same order as the ctypes structure in binding.py.
struct MemfitStats {
  std::int64_t live, peak, mapped, mapped_peak, pooled, blocks, allocations, limit;
};

int memfit_interface() {
  return 3;
}

// Makes glibc give freed memory back: with its defaults the peak of a process stays 11 to 100 % above its live tensors.
int memfit_tame_malloc() {
#ifdef __GLIBC__
  return mallopt(M_MMAP_THRESHOLD, 131072) == 1 && mallopt(M_TRIM_THRESHOLD, 131072) == 1 ? 0 : 1;
#else
  return 0;
#endif
}

// 0, or 1 where another allocator of a higher priority stays in place.
int memfit_install() {
  static MemfitAllocator* const allocator = [] {
    state().page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    pthread_atfork(&before_fork, &after_fork, &after_fork);
    return new MemfitAllocator();
  }();
  c10::SetCPUAllocator(allocator, 200);
  return c10::GetCPUAllocator() == allocator ? 0 : 1;
}

int memfit_set_ledger(int ledger) {
  const int before = t_ledger;
  if (is_ledger(ledger)) {
    t_ledger = ledger;
  }
  return before;
}

void memfit_stats(int ledger, MemfitStats* out) {
  State& s = state();
  Lock lock(s.mutex);
  const Account& a = s.accounts[ledger];
  *out = {a.live, a.peak, a.mapped, a.mapped_peak, a.pooled, a.blocks, a.allocations, a.limit};
}

void memfit_reset_peak(int ledger) {
  State& s = state();
  Lock lock(s.mutex);
  s.accounts[ledger].peak = s.accounts[ledger].live;
  s.accounts[ledger].mapped_peak = s.accounts[ledger].mapped;
}

// A second peak of live bytes, for whoever looks at one operation while others keep their own peak. Starts it again.
void memfit_watch(int ledger) {
  State& s = state();
  Lock lock(s.mutex);
  s.accounts[ledger].watched_peak = s.accounts[ledger].live;
}

std::int64_t memfit_watched_peak(int ledger) {
  State& s = state();
  Lock lock(s.mutex);
  return s.accounts[ledger].watched_peak;
}

void memfit_set_limit(int ledger, std::int64_t bytes) {
  State& s = state();
  Lock lock(s.mutex);
  Account& account = s.accounts[ledger];
  account.limit = bytes;
  evict(s, lock, ledger, [&] { return above_limit(account, 0); });
}

std::int64_t memfit_pool_limit() {
  State& s = state();
  Lock lock(s.mutex);
  return s.pool_limit;
}

void memfit_set_pool_limit(std::int64_t bytes) {
  State& s = state();
  Lock lock(s.mutex);
  s.pool_limit = bytes;
  evict(s, lock, -1, [&] { return s.above_pool_limit(); });
}

std::int64_t memfit_trim() {
  State& s = state();
  Lock lock(s.mutex);
  const std::int64_t given_back = evict(s, lock, -1, all_of_it);
  for (Account& account : s.accounts) {
    account.used_peak = account.used();
  }
  lock.unlock();
#ifdef __GLIBC__
  malloc_trim(0);
#endif
  return given_back;
}

}  // extern "C"
