// What torch asks of a device beside kernels: guard, streams and events, pinned memory, generators, hooks.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <chrono>

#include "allocator.h"

namespace late {

// ------------------------------------------------------------------------------------------------ pinned host memory
inline void pin(uintptr_t begin, size_t nbytes) { add_pin(begin, nbytes); }

inline void unpin(uintptr_t begin) {
  Guarded lock(everything());
  size_t nbytes = drop_pin(begin);
  Races::all().note_host(reinterpret_cast<void*>(begin), nbytes, "unpin");
  for (int d = 0; d < kDevices; ++d) Streams::all().synchronize(d);  // late tasks hold bare addresses
}

struct HostAllocator final : at::HostAllocator {
  static HostAllocator& one() {
    static auto* allocator = new HostAllocator;
    return *allocator;
  }
  c10::DataPtr allocate(size_t nbytes) override {
    void* p = nullptr;
    if (nbytes) {
      TORCH_CHECK(posix_memalign(&p, 4096, nbytes) == 0, "late: no memory to pin");
      add_pin(uintptr_t(p), nbytes);
    }
    return {p, p, &give_up, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_up; }
  void copy_data(void* to, const void* from, size_t nbytes) const override { std::memcpy(to, from, nbytes); }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}

 private:
  // CUDA's caching host allocator keeps freed memory until the copies that used it are through. Here all streams are
  // brought to their ends first, which is the same to whoever looks, and no error of theirs.
  static void give_up(void* p) {
    if (!p) return;
    Guarded lock(everything());
    for (int d = 0; d < kDevices; ++d) Streams::all().synchronize(d);
    Races::all().note_host(p, drop_pin(uintptr_t(p)), "free of pinned memory");
    std::free(p);
  }
};

// ------------------------------------------------------------------------------------------------ generators
struct Generator final : at::CPUGeneratorImpl {  // a CPU generator's numbers, under the device's name
  explicit Generator(int device) : inner(at::detail::createCPUGenerator()) {
    device_ = c10::Device(kType, device);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
  at::Generator inner;
  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return inner.seed(); }
  void set_state(const c10::TensorImpl& state) override { inner.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return inner.unsafeGetGeneratorImpl()->get_state(); }
};
inline const at::Generator& default_generator(int device) {
  static auto* made = new std::vector<at::Generator>{at::make_generator<Generator>(0), at::make_generator<Generator>(1)};
  return (*made)[index_or_current(device)];
}
inline at::Generator& inner(const at::Generator& generator) { return static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->inner; }

// ------------------------------------------------------------------------------------------------ guard
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  c10::Device getDevice() const override { return c10::Device(kType, t_device); }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < kDevices, "late: there is no device ", device);
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) t_device = device.index();
  }

  c10::Stream getStream(c10::Device device) const override { return current(index_or_current(device.index())).handle(); }
  c10::Stream getDefaultStream(c10::Device device) const override { return Streams::all().at(index_or_current(device.index()), 0).handle(); }
  c10::Stream getNewStream(c10::Device device, int) const override { return Streams::all().add(index_or_current(device.index())).handle(); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = current(stream.device_index()).handle();
    t_stream[stream.device_index()] = stream.id();
    return before;
  }
  bool queryStream(const c10::Stream& stream) const override {
    Guarded lock(everything());
    return Streams::all().get(stream).pending.empty();
  }
  void synchronizeStream(const c10::Stream& stream) const override { Streams::all().synchronize(Streams::all().get(stream)); }
  void synchronizeDevice(c10::DeviceIndex device) const override { Streams::all().synchronize(index_or_current(device)); }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override { Allocator::one().recordStream(pointer, stream); }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new Event;
    of(*event).record(Streams::all().get(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) of(event).block(Streams::all().get(stream));
  }
  bool queryEvent(void* event) const override { return !event || of(event).query(); }
  void synchronizeEvent(void* event) const override {
    if (event) of(event).synchronize();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  // By the links' rates, in milliseconds; 0 where they have none.
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    return Timing::all().is_on() ? 1e3 * (of(to).through_s - of(from).through_s) : 0.0;
  }

 private:
  static Event& of(void* event) { return *static_cast<Event*>(event); }
};

// ------------------------------------------------------------------------------------------------ hooks
struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return t_device; }
  void setCurrentDevice(c10::DeviceIndex device) const override { t_device = device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override { return std::exchange(t_device, int(device)); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return device < 0 ? t_device : exchangeDevice(device); }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &HostAllocator::one(); }
  c10::Device getDeviceFromPtr(void* address) const override { return c10::Device(kType, device_of(address)); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override { return at::make_generator<Generator>(index_or_current(device)); }

  // What a storage holds goes along in the order of the current stream, as on CUDA; the old bytes are freed at once.
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    Guarded lock(everything());
    auto* impl = storage.unsafeGetStorageImpl();
    int device = index_or_current(impl->device().index());
    auto fresh = Allocator::one().allocate_on(nbytes, device);
    if (size_t kept = std::min(nbytes, impl->nbytes()); kept && impl->data()) {
      auto& stream = current(device);
      note(stream, {{impl->data(), kept, false}, {fresh.get(), kept, true}}, "resize of a storage");
      Streams::all().enqueue(stream, [to = behind(fresh.get()), from = behind(impl->data()), kept] { std::memcpy(to, from, kept); });
    }
    impl->set_data_ptr_noswap(std::move(fresh));
    impl->set_nbytes(nbytes);
  }
};

}  // namespace late
