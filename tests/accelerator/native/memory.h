// Device memory that the host cannot touch, and the host memory that is pinned.
//
// Every device owns two mappings of equal size. Tensors point into its *face*, which is PROT_NONE: code on the host that
// reads or writes device memory dies by SIGSEGV, at once and always. Kernels use the *back*, at the same offset.
#pragma once

#include <c10/core/Device.h>
#include <c10/util/Exception.h>
#include <sys/mman.h>

#include <array>
#include <cstdint>
#include <map>
#include <mutex>

namespace late {

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr int kDevices = 2;  // two, so that code which asks for "the current device" instead of the tensor's is found
constexpr size_t kSpanBytes = size_t(16) << 30;   // addresses of a device
constexpr size_t kTotalBytes = size_t(4) << 30;   // memory that a device says it has
constexpr int kPoison = 0xFF;                     // NaN in every floating type, -1 in integers

// One lock for everything: streams, clocks, allocator, pins. It is never held while the interpreter's lock is taken.
inline std::recursive_mutex& everything() {
  static auto* mutex = new std::recursive_mutex;  // never destroyed: tensors may be freed after static destructors ran
  return *mutex;
}
using Guarded = std::lock_guard<std::recursive_mutex>;

struct Span {
  char* face;
  char* back;
};

inline const Span& span(int device) {
  static const auto* spans = [] {
    auto* made = new std::array<Span, kDevices>;
    for (auto& each : *made) {
      auto map = [](int protection) {
        void* p = mmap(nullptr, kSpanBytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        TORCH_CHECK(p != MAP_FAILED, "late: no address space for the device's memory");
        return static_cast<char*>(p);
      };
      each = Span{map(PROT_NONE), map(PROT_READ | PROT_WRITE)};
    }
    return made;
  }();
  return (*spans)[device];
}

// Index of the device whose face holds the address; -1 for memory of the host.
inline int device_of(const void* address) {
  auto* p = static_cast<const char*>(address);
  for (int d = 0; p && d < kDevices; ++d)
    if (p >= span(d).face && p < span(d).face + kSpanBytes) return d;
  return -1;
}

// The address that a kernel uses: behind a face, and anything else as it is.
inline void* behind(const void* address) {
  int d = device_of(address);
  if (d < 0) return const_cast<void*>(address);
  return span(d).back + (static_cast<const char*>(address) - span(d).face);
}

// ------------------------------------------------------------------------------------------------ pinned host memory
inline std::map<uintptr_t, size_t>& pinned() {
  static auto* ranges = new std::map<uintptr_t, size_t>;
  return *ranges;
}

inline bool is_pinned(const void* address) {
  Guarded lock(everything());
  auto at = pinned().upper_bound(uintptr_t(address));
  if (at == pinned().begin()) return false;
  --at;
  return uintptr_t(address) < at->first + at->second;
}

inline void add_pin(uintptr_t begin, size_t nbytes) {
  Guarded lock(everything());
  TORCH_CHECK(begin && nbytes, "late: nothing to pin");
  auto next = pinned().lower_bound(begin);
  bool overlaps = next != pinned().end() && next->first < begin + nbytes;
  if (next != pinned().begin()) {
    auto before = std::prev(next);
    overlaps = overlaps || before->first + before->second > begin;
  }
  // As cudaHostRegister does (cudaErrorHostMemoryAlreadyRegistered).
  TORCH_CHECK(!overlaps, "late: part or all of the requested memory range is already mapped");
  pinned()[begin] = nbytes;
}

inline size_t drop_pin(uintptr_t begin) {
  Guarded lock(everything());
  auto at = pinned().find(begin);
  TORCH_CHECK(at != pinned().end(), "late: pointer does not correspond to a registered memory region");
  size_t nbytes = at->second;
  pinned().erase(at);
  return nbytes;
}

}  // namespace late
