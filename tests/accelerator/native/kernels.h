// Kernels: torch's own for the CPU, on aliases of the device's memory.
//
// A kernel runs when it is launched, behind all that its stream was given to do or to wait for. Copies of whole memory
// are late. Views, storages and copies are written here; everything else goes through one boxed fallback, which reads
// from the operator's schema what is written.
//
// `everything()` is not held here: a reference to a tensor may need the interpreter's lock (when its Python object wakes), and
// whoever frees a tensor in Python holds that one and waits for ours.
#pragma once

#include <ATen/ATen.h>
#include <ATen/InferSize.h>
#include <ATen/autocast_mode.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/CPUAllocator.h>
#include <torch/library.h>

#include <set>

#include "runtime.h"

namespace late {

inline bool is_here(const at::Tensor& t) { return t.defined() && t.device().type() == kType; }

// The bytes from a tensor's first element to its last.
inline Touch touch_of(const at::Tensor& t, bool writes) {
  if (!t.defined() || !t.numel() || !t.has_storage() || !t.storage().data()) return {nullptr, 0, writes};
  size_t last = 0;
  for (int64_t i = 0; i < t.dim(); ++i) last += (t.size(i) - 1) * t.stride(i);
  auto* begin = static_cast<const char*>(t.storage().data()) + t.storage_offset() * t.element_size();
  return {begin, (last + 1) * t.element_size(), writes};
}

// Kernels that were launched, by name: a test shows with it that its operators ran here.
inline std::map<std::string, int64_t>& launched() {
  static auto* counts = new std::map<std::string, int64_t>;
  return *counts;
}

inline void count_launch(const std::string& name) {
  Guarded lock(everything());
  ++launched()[name];
}

// A tensor over the storage of `base` with the form of `like`, which may have another dtype (a view of complex numbers as real ones).
inline at::Tensor view_over(const at::Tensor& base, const at::Tensor& like) {
  auto t = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(base.storage()), base.key_set(), like.dtype());
  t.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  t._set_conj(like.is_conj());
  t._set_neg(like.is_neg());
  return t;
}

// ------------------------------------------------------------------------------------------------ aliases
// CPU tensors over the memory behind device tensors; storages that are one stay one.
class Aliases {
 public:
  int device = -1;

  at::Tensor of(const at::Tensor& t) {
    if (!is_here(t)) return t;
    TORCH_CHECK(device < 0 || device == t.device().index(), "Expected all tensors to be on the same device, but found at least two devices, late:",
                device, " and ", t.device());
    device = t.device().index();
    for (auto& made : made_)
      if (made.original.is_same(t)) return made.alias;
    auto impl = c10::make_intrusive<c10::TensorImpl>(c10::Storage(twin(t)), c10::DispatchKeySet(c10::DispatchKey::CPU), t.dtype());
    impl->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
    at::Tensor alias(std::move(impl));
    alias._set_conj(t.is_conj());
    alias._set_neg(t.is_neg());
    made_.push_back({t, alias, alias.storage().mutable_data()});
    return alias;
  }

  // The device's tensor for what a kernel returned.
  at::Tensor back(const at::Tensor& t) {
    if (!t.defined() || !t.device().is_cpu()) return t;
    for (auto& made : made_)
      if (made.alias.is_same(t)) return made.original;
    for (auto& made : made_)
      if (made.alias.storage().is_alias_of(t.storage())) return view_over(made.original, t);
    auto out = at::empty_strided(t.sizes(), t.strides(), t.options().device(c10::Device(kType, device)));
    if (!t.numel()) return out;
    if (t._is_zerotensor()) return out.zero_();  // zeros without memory, which autograd makes for some derivatives
    auto& stream = current(device);
    auto touch = touch_of(out, true);
    note(stream, {touch}, "result of a kernel");
    Streams::all().drain(stream);  // the poison of who had the memory before
    auto* from = static_cast<const char*>(t.storage().data()) + t.storage_offset() * t.element_size();
    std::memcpy(behind(touch.begin), from, touch.nbytes);
    out._set_conj(t.is_conj());
    out._set_neg(t.is_neg());
    return out;
  }

  // Outputs that a kernel gave another shape or other memory.
  void take_back() {
    for (auto& made : made_) {
      auto& here = made.original;
      auto& alias = made.alias;
      if (alias.storage().mutable_data() != made.bytes) {
        size_t nbytes = alias.storage().nbytes();
        auto* impl = here.storage().unsafeGetStorageImpl();
        impl->set_data_ptr_noswap(Allocator::one().allocate_on(nbytes, device));
        impl->set_nbytes(nbytes);
        note(current(device), {{impl->data(), nbytes, true}}, "resized result of a kernel");
        Streams::all().drain(current(device));
        std::memcpy(behind(impl->data()), alias.storage().data(), nbytes);
      }
      if (alias.sizes() != here.sizes() || alias.strides() != here.strides())
        here.unsafeGetTensorImpl()->set_sizes_and_strides(alias.sizes(), alias.strides());
    }
  }

 private:
  struct Made {
    at::Tensor original, alias;
    void* bytes;
  };
  c10::Storage twin(const at::Tensor& t) {
    auto* impl = t.storage().unsafeGetStorageImpl();
    for (auto& [from, to] : twins_)
      if (from == impl) return to;
    c10::Storage to(c10::Storage::use_byte_size_t(), impl->nbytes(), c10::DataPtr(behind(impl->data()), c10::Device(c10::kCPU)),
                    c10::GetCPUAllocator(), /*resizable=*/true);
    twins_.emplace_back(impl, to);
    return to;
  }
  std::vector<std::pair<c10::StorageImpl*, c10::Storage>> twins_;
  std::vector<Made> made_;
};

// A kernel begins on the current stream of its device.
inline void launch(const Aliases& aliases, const std::vector<Touch>& touches, const std::string& name) {
  auto& stream = current(aliases.device);
  note(stream, touches, name);
  if (!Timing::all().is_counted()) Timing::all().wait_until(stream.through_s);
  Streams::all().drain(stream);
  count_launch(name);
}

// While it lives, a kernel computes: on the counted clock its stream is through so much later.
struct Computing {
  explicit Computing(int device) : stream(current(device)), began_s(processor_s()) {}
  ~Computing() {
    if (Timing::all().is_counted()) add(stream, processor_s() - began_s);
  }
  static void add(LateStream& stream, double seconds) {
    Guarded lock(everything());
    stream.through_s = std::max(stream.through_s, Timing::all().now_s()) + seconds;
    Timing::all().compute_s += seconds;
  }
  Standing standing;
  LateStream& stream;
  double began_s;
};

// ------------------------------------------------------------------------------------------------ the fallback
inline bool is_generator(const c10::Argument& argument) { return argument.type()->str().find("Generator") != std::string::npos; }
inline bool takes_generator(const c10::FunctionSchema& schema) { return std::any_of(schema.arguments().begin(), schema.arguments().end(), is_generator); }

// While it lives, the CPU's default generator continues the device's: for operators that draw without an argument that says from what (dropout).
struct Lent {
  explicit Lent(int device) : own(inner(default_generator(device))) { lent.set_state(own.get_state()); }
  ~Lent() {
    own.set_state(lent.get_state());
    lent.set_state(before);
  }
  at::Generator lent = at::detail::getDefaultCPUGenerator();
  at::Tensor before = lent.get_state();
  at::Generator own;
};

// Runs `op` on the CPU; `runs` is another operator with the same arguments, if not itself.
inline void run_boxed(const c10::OperatorHandle& op, const c10::OperatorHandle& runs, torch::jit::Stack* stack) {
  Standing standing;
  auto& schema = op.schema();
  size_t n_arguments = schema.arguments().size(), n_results = schema.returns().size();
  size_t first = stack->size() - n_arguments;
  Aliases aliases;
  std::vector<Touch> touches;
  const at::Tensor* on_host = nullptr;
  auto alias = [&](const at::Tensor& t, bool writes) {
    if (is_here(t)) touches.push_back(touch_of(t, writes));
    else if (t.defined() && t.device().is_cpu() && t.dim() > 0) on_host = &t;
    return aliases.of(t);
  };
  for (size_t i = 0; i < n_arguments; ++i) {
    auto& value = (*stack)[first + i];
    auto* info = schema.arguments()[i].alias_info();
    bool writes = info && info->isWrite();
    if (value.isTensor()) {
      value = alias(value.toTensor(), writes);
    } else if (value.isTensorList()) {
      std::vector<at::Tensor> list;
      for (const at::Tensor& t : value.toTensorVector()) list.push_back(alias(t, writes));
      value = c10::IValue(c10::List<at::Tensor>(list));
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (std::optional<at::Tensor> t : value.toOptionalTensorList()) list.push_back(t ? std::optional(alias(*t, writes)) : std::nullopt);
      value = c10::IValue(list);
    } else if (value.isDevice() && value.toDevice().type() == kType) {
      aliases.device = index_or_current(value.toDevice().index());
      value = c10::IValue(c10::Device(c10::kCPU));
    } else if (value.isGenerator() && value.toGenerator().device().type() == kType) {
      value = c10::IValue(inner(value.toGenerator()));
    }
  }
  aliases.device = index_or_current(aliases.device);
  // As on CUDA, a tensor of the host's may be a number or an index, and nothing else.
  TORCH_CHECK(!on_host || schema.name().find("index") != std::string::npos, "Expected all tensors to be on the same device, but found at least two devices, late:",
              aliases.device, " and cpu! (in ", schema.name(), ")");
  for (size_t i = 0; i < n_arguments; ++i)
    if ((*stack)[first + i].isNone() && is_generator(schema.arguments()[i]))
      (*stack)[first + i] = c10::IValue(inner(default_generator(aliases.device)));
  launch(aliases, touches, schema.name());
  {
    c10::impl::ExcludeDispatchKeyGuard below_autograd(c10::autograd_dispatch_keyset);
    std::optional<Lent> lent;
    if (op.hasTag(at::Tag::nondeterministic_seeded) && !takes_generator(schema)) lent.emplace(aliases.device);
    Computing computing(aliases.device);
    if (&op == &runs) runs.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
    else runs.callBoxed(stack);
  }
  aliases.take_back();
  for (size_t i = stack->size() - n_results; i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    if (value.isTensor()) {
      value = aliases.back(value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<at::Tensor> list;
      for (const at::Tensor& t : value.toTensorVector()) list.push_back(aliases.back(t));
      value = c10::IValue(c10::List<at::Tensor>(list));
    }
  }
}
inline void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) { run_boxed(op, op, stack); }

// ------------------------------------------------------------------------------------------------ making and viewing
using Size = c10::IntArrayRef;
using Maybe = std::optional<bool>;

inline at::Tensor empty_strided(Size size, Size stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<c10::Device> device, Maybe) {
  auto type = c10::scalarTypeToTypeMeta(dtype.value_or(c10::get_default_dtype_as_scalartype()));
  size_t nbytes = at::detail::computeStorageNbytes(size, stride, type.itemsize());
  auto data = Allocator::one().allocate_on(nbytes, index_or_current(device ? device->index() : -1));
  c10::Storage storage(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), nbytes, std::move(data), &Allocator::one(), true));
  auto t = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), type);
  t.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride);
  return t;
}
inline at::Tensor empty(Size size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout, std::optional<c10::Device> device, Maybe pin, std::optional<at::MemoryFormat> format) {
  std::vector<int64_t> stride;
  switch (format.value_or(at::MemoryFormat::Contiguous)) {
    case at::MemoryFormat::ChannelsLast: stride = c10::get_channels_last_strides_2d(size); break;
    case at::MemoryFormat::ChannelsLast3d: stride = c10::get_channels_last_strides_3d(size); break;
    default: {
      auto plain = c10::contiguous_strides(size);
      stride.assign(plain.begin(), plain.end());
    }
  }
  return empty_strided(size, stride, dtype, layout, device, pin);
}
inline at::Tensor strided(const at::Tensor& self, Size size, Size stride, std::optional<int64_t> offset) {
  auto t = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(self.storage()), self.key_set(), self.dtype());
  t.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset.value_or(self.storage_offset()));
  return t;
}
inline at::Tensor view(const at::Tensor& self, Size size) {
  auto whole = at::infer_size_dv(size, self.numel());
  auto stride = at::detail::computeStride(self.sizes(), self.strides(), whole);
  TORCH_CHECK(stride.has_value(), "view size is not compatible with input tensor's size and stride (at least one dimension spans across two "
              "contiguous subspaces). Use .reshape(...) instead.");
  return strided(self, whole, *stride, self.storage_offset());
}
inline at::Tensor reshape_alias(const at::Tensor& self, Size size, Size stride) { return strided(self, size, stride, self.storage_offset()); }

inline void grow(const c10::Storage& storage, size_t nbytes) {
  if (nbytes > storage.nbytes()) at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(storage, nbytes);
}
inline const at::Tensor& resize_(const at::Tensor& self, Size size, std::optional<at::MemoryFormat>) {
  auto stride = c10::contiguous_strides(size);
  grow(self.storage(), (c10::multiply_integers(size) + self.storage_offset()) * self.element_size());
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride);
  return self;
}
inline at::Tensor& set_part(at::Tensor& self, at::Storage source, int64_t offset, Size size, Size stride) {
  TORCH_CHECK(source.device().type() == kType, "Expected a storage on ", self.device(), " but got one on ", source.device());
  std::vector<int64_t> whole(stride.begin(), stride.end());
  if (whole.size() != size.size()) {
    auto plain = c10::contiguous_strides(size);
    whole.assign(plain.begin(), plain.end());
  }
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(source);
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, whole, offset);
  grow(source, at::detail::computeStorageNbytes(size, whole, self.element_size(), offset));
  return self;
}
inline at::Tensor& set_storage(at::Tensor& self, at::Storage source) {
  int64_t n = source.nbytes() / self.element_size();
  return set_part(self, source, 0, {n}, {1});
}
inline at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_part(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}
inline at::Tensor& set_nothing(at::Tensor& self) { return set_part(self, at::empty({0}, self.options()).storage(), 0, {0}, {1}); }
inline void record_stream(at::Tensor& self, c10::Stream stream) { Allocator::one().recordStream(self.storage().data_ptr(), stream); }

// ------------------------------------------------------------------------------------------------ copies
inline at::Scalar item(const at::Tensor& self) {
  Aliases aliases;
  auto alias = aliases.of(self);
  launch(aliases, {touch_of(self, false)}, "item");
  Streams::all().synchronize(current(aliases.device));
  return at::_local_scalar_dense(alias);
}

inline bool is_plain_copy(const at::Tensor& from, const at::Tensor& to) {
  return from.dtype() == to.dtype() && from.sizes() == to.sizes() && from.strides() == to.strides() && from.is_non_overlapping_and_dense() &&
         from.is_conj() == to.is_conj() && from.is_neg() == to.is_neg();
}

// Between the memories of two devices, as CUDA does it: on the source's stream, which first waits for the destination's,
// and which that one waits for.
inline void copy_between(const at::Tensor& from, const at::Tensor& to) {
  auto &source = current(from.device().index()), &target = current(to.device().index());
  Event ready, done;
  ready.record(target);
  ready.block(source);
  note(source, {touch_of(from, false), touch_of(to, true)}, "copy between devices");
  Streams::all().drain(source);
  count_launch("copy between devices");
  Aliases a, b;
  {
    c10::impl::ExcludeDispatchKeyGuard below_autograd(c10::autograd_dispatch_keyset);
    b.of(to).copy_(a.of(from));
  }
  done.record(source);
  done.block(target);
}

inline at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (!to.numel()) return to;
  if (is_here(from) && is_here(to) && from.device() != to.device()) {
    copy_between(from, to);
    return to;
  }
  Aliases aliases;
  auto a = aliases.of(from), b = aliases.of(to);
  auto& stream = current(aliases.device);
  bool crosses = !is_here(from) || !is_here(to), is_plain = is_plain_copy(from, to);
  bool is_free = crosses && non_blocking && is_pinned((is_here(from) ? to : from).storage().data());  // the host goes on at once
  std::string name = !crosses ? "copy" : is_here(to) ? "copy to device" : "copy to host";
  note(stream, {touch_of(from, false), touch_of(to, true)}, name);
  count_launch(name);
  if (crosses) Streams::all().pass_link(stream, /*to_host=*/is_here(from), touch_of(is_here(from) ? from : to, true).nbytes);
  bool is_staged = crosses && non_blocking && !is_free && is_plain && is_here(to);
  if (is_staged) a = a.clone();  // pageable memory is read before the call returns, and written when the stream comes to it
  if (is_plain && (is_free || is_staged || !crosses)) {
    size_t nbytes = touch_of(b, true).nbytes;
    auto* target = static_cast<char*>(b.storage().mutable_data()) + b.storage_offset() * b.element_size();
    auto* source = static_cast<const char*>(a.storage().data()) + a.storage_offset() * a.element_size();
    Streams::all().enqueue(stream, /*is_late_copy=*/crosses, [target, source, nbytes, staged = is_staged ? a : at::Tensor()] { std::memmove(target, source, nbytes); });
    return to;
  }
  if (crosses) Timing::all().wait_until(stream.through_s);
  Streams::all().drain(stream);
  {
    c10::impl::ExcludeDispatchKeyGuard below_autograd(c10::autograd_dispatch_keyset);
    Computing computing(aliases.device);
    b.copy_(a);
  }
  if (crosses && !is_free) Streams::all().synchronize(stream);
  return to;
}
inline at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (from.sizes() != to.sizes()) resize_(to, from.sizes(), std::nullopt);
  return copy_from(from, to, false);
}

// ------------------------------------------------------------------------------------------------ operators of accelerators
inline at::Tensor convolution(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias, Size stride, Size padding, Size dilation,
                              bool transposed, Size output_padding, int64_t groups) {
  Aliases aliases;
  auto x = aliases.of(input), w = aliases.of(weight);
  std::vector<Touch> touches{touch_of(input, false), touch_of(weight, false)};
  std::optional<at::Tensor> b;
  if (bias && bias->defined()) {
    b = aliases.of(*bias);
    touches.push_back(touch_of(*bias, false));
  }
  launch(aliases, touches, "aten::convolution");
  c10::impl::ExcludeDispatchKeyGuard below_autograd(c10::autograd_dispatch_keyset);
  Computing computing(aliases.device);
  return aliases.back(at::convolution(x, w, b, stride, padding, dilation, transposed, output_padding, groups));
}
inline std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(const at::Tensor& gradient, const at::Tensor& input, const at::Tensor& weight, Size stride, Size padding,
                                                                           Size dilation, bool transposed, Size output_padding, int64_t groups, std::array<bool, 3> mask) {
  Aliases aliases;
  auto g = aliases.of(gradient), x = aliases.of(input), w = aliases.of(weight);
  launch(aliases, {touch_of(gradient, false), touch_of(input, false), touch_of(weight, false)}, "aten::convolution_backward");
  c10::impl::ExcludeDispatchKeyGuard below_autograd(c10::autograd_dispatch_keyset);
  std::vector<int64_t> biases{transposed ? weight.size(1) * groups : weight.size(0)};
  Computing computing(aliases.device);
  auto [dx, dw, db] = at::convolution_backward(g, x, w, at::OptionalIntArrayRef(biases), stride, padding, dilation, transposed, output_padding, groups, mask);
  return {aliases.back(dx), aliases.back(dw), aliases.back(db)};
}
// CUDA counts integers too, the CPU does not.
inline at::Tensor histc(const at::Tensor& self, int64_t bins, const at::Scalar& low, const at::Scalar& high) {
  Aliases aliases;
  auto x = aliases.of(self);
  launch(aliases, {touch_of(self, false)}, "aten::histc");
  c10::impl::ExcludeDispatchKeyGuard below_autograd(c10::autograd_dispatch_keyset);
  if (at::isFloatingType(x.scalar_type())) return aliases.back(at::histc(x, bins, low, high));
  return aliases.back(at::histc(x.to(at::kDouble), bins, low, high).to(x.scalar_type()));
}

// Which attention: the one that the CPU would take. Its operators and their backward go through the fallback.
inline int64_t choose_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const std::optional<at::Tensor>& mask, double dropout,
                                bool is_causal, std::optional<double> scale, bool enable_gqa) {
  Aliases aliases;
  auto alias = [&](const at::Tensor& t) { return aliases.of(t).set_requires_grad(t.requires_grad()); };  // which the choice depends on
  std::optional<at::Tensor> its_mask = mask ? std::optional(alias(*mask)) : std::nullopt;
  return at::_fused_sdp_choice(alias(query), alias(key), alias(value), its_mask, dropout, is_causal, scale, enable_gqa);
}

// What is written above, and what `register_kernels` must leave alone.
inline const std::set<std::string>& own_kernels() {
  static auto* names = new std::set<std::string>{
      "aten::empty.memory_format", "aten::empty_strided", "aten::as_strided", "aten::view", "aten::_reshape_alias", "aten::resize_",
      "aten::set_.source_Storage", "aten::set_.source_Storage_storage_offset", "aten::set_.source_Tensor", "aten::set_",
      "aten::_local_scalar_dense", "aten::_copy_from", "aten::_copy_from_and_resize", "aten::record_stream", "aten::histc",
      "aten::convolution_overrideable", "aten::convolution_backward_overrideable"};
  return *names;
}

// An operator for which torch has both a CPU kernel and a composition of others is composed on a new device, to other bits than
// its CPU kernel gives. Those take the fallback by name. (Compositions without a derivative of their own stay compositions.)
inline std::vector<c10::OperatorName> composed_elsewhere() {
  std::vector<c10::OperatorName> names;
  for (auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0 || own_kernels().count(c10::toString(name))) continue;
    auto op = c10::Dispatcher::singleton().findOp(name);
    if (!op || !op->hasSchema() || !op->hasKernelForDispatchKey(c10::DispatchKey::CPU)) continue;
    bool is_view = false;
    for (auto& result : op->schema().returns()) is_view = is_view || (result.alias_info() && !result.alias_info()->isWrite());
    bool is_explicit = op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd) ||
                       op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutogradNonFunctional);
    bool is_implicit = op->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) && op->hasKernelForDispatchKey(c10::DispatchKey::Autograd);
    if (!is_view && (is_explicit || is_implicit)) names.push_back(name);
  }
  return names;
}

}  // namespace late
