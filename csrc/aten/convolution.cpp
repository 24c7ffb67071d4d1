// The way in: kernels of plain C for PyTorch's convolution operators, and the same for a call from Python.
//
// A call becomes a key of integers. The table says how that call is computed: by a plan of the CPU kernels, by
// launches of GPU kernels, or by PyTorch. A call that is not in the table goes up to Python once, which validates it,
// chooses backends, computes the result and stores the entry. Python also gets every call while an observer must be
// told of calls, or while a backend is requested.
//
// The kernels serve two pairs of operators. aten::convolution and aten::convolution_backward are every convolution of
// the process; they are registered by `takeover`. aten::convolution_overrideable and its backward exist for backends
// outside of PyTorch: they have PyTorch's own autograd, and nothing else calls them on a CPU or a CUDA device. So the
// backward of a call of this library is known to be its own.
#include <pthread.h>

#include <atomic>
#include <exception>
#include <new>
#include <string>

#include "../convgrad_native.h"
#include "cuda_launch.h"
#include "libtorch.h"
#include "table.h"

#define CONVGRAD_EXPORT extern "C" __attribute__((visibility("default")))

// PyTorch's exception for an error of Python's (torch/csrc/Exceptions.h). It is caught by its name, and carries the
// error from the thread that raised it to the one that called. `message` has its place in PyTorch's, and stays empty.
struct __attribute__((visibility("default"))) python_error : public std::exception {
  aten::Object *type = nullptr, *value = nullptr, *traceback = nullptr;
  std::string message;
  python_error();  // takes the error that Python has
  ~python_error() override;
  const char* what() const noexcept override { return "an error in Python"; }
};

namespace aten {
namespace {

Functions f;
Table& table = *new Table;  // never destroyed: threads may compute while the process ends
Object* callback = nullptr;          // the Python function that computes what the table does not have
std::atomic<int> told{0};            // how many must be told of every call, or have requested a backend
std::atomic<int> taken_over{0};      // how many blocks have every convolution of the process computed here
std::atomic<int> others_kernels{0};  // other code has its kernels at the keys: PyTorch's are not what a call would run
size_t tensor_offset = 0;            // of the at::Tensor in Python's object
thread_local int inside = 0;         // this thread computes a call: convolutions within are PyTorch's
thread_local int python_inside = 0;  // the same, said by Python

// While one is alive, this thread computes a call.
struct Inside {
  Inside() { inside++; }
  ~Inside() { inside--; }
};

constexpr int kMostRank = 5;
constexpr int32_t kCpu = 0, kGpu = 1;  // the numbers of device types

struct Ints {
  int64_t values[2 * kMostRank];
  int64_t count = 0;
  bool fits = true;
};

enum Operator { kConvolution = 0, kConvolutionBackward = 1, kOverrideable = 2, kOverrideableBackward = 3 };
bool is_backward(int op) { return op & 1; }
bool is_pytorchs(int op) { return op < kOverrideable; }

// A tensor's geometry, dtype and device.
struct Described {
  int64_t rank = 0, *sizes = nullptr, *strides = nullptr;
  int32_t dtype = -1, device = -1, index = -1;
  Failed failed;

  explicit Described(Tensor t)
      : failed(f.aoti_torch_get_device_type(t, &device) || f.aoti_torch_get_device_index(t, &index) ||
               f.aoti_torch_get_dtype(t, &dtype) || f.aoti_torch_get_dim(t, &rank) ||
               f.aoti_torch_get_sizes(t, &sizes) || f.aoti_torch_get_strides(t, &strides)) {}
};

// One call of any of the operators. It owns its tensors, unless they are those in Python's objects.
struct Call {
  int op;
  bool owns = true;
  Tensor tensors[3] = {};  // input, weight, bias or null; grad_output, input, weight
  Ints bias_sizes, stride, padding, dilation, output_padding;
  bool has_bias_sizes = false;
  int32_t transposed = 0, mask[3] = {};
  int64_t groups = 1;
  Key key;

  Call() = default;
  Call(const Call&) = delete;
  ~Call() {
    for (Tensor t : tensors)
      if (t && owns) f.aoti_torch_delete_tensor_object(t);
  }
  bool on_cpu() const { return Described(tensors[0]).device == kCpu; }
};

// ---- entries of the table ----------------------------------------------------------------------------

enum StepKind : int32_t { kPytorch = 0, kNative = 1, kSumOfBias = 2, kCuda = 3 };

// The launches of GPU kernels that compute a step.
struct Launches {
  static constexpr int kMost = 3;
  int32_t count, scratches;
  int64_t scratch_bytes[kMost];
  CudaLaunch launches[kMost];
};

// Part of a call: which results it computes, and how. `engine/entry.py` packs the same bytes.
struct Step {
  int32_t kind, results;  // bit i: result i
  union {
    convgrad_plan plan;  // of kNative
    Launches cuda;       // of kCuda
  };
};

struct ResultShape {
  int64_t rank, sizes[kMostRank], strides[kMostRank];
};

struct Entry {
  int32_t steps;            // 0: all of it is PyTorch's
  int32_t pytorchs_autograd;  // of a forward: its gradients are PyTorch's as well, and lose nothing by that
  int32_t copied;             // bit i: plans read a dense copy of operand i
  int32_t channels_last;      // the layout of the copies
  ResultShape results[3];
  const Step* step() const { return reinterpret_cast<const Step*>(this + 1); }
};

const Entry* entry_of(const Table::Found& found) { return static_cast<const Entry*>(found.entry()); }

// ---- keys -------------------------------------------------------------------------------------------------

bool add(Key& key, const Ints& ints) {
  key.add(ints.count);
  for (int64_t i = 0; i < ints.count; i++) key.add(ints.values[i]);
  return ints.fits;
}

// The dtypes that autocast casts to another of them: torch.float16, float32 and bfloat16.
bool is_cast(int32_t dtype) { return dtype == 5 || dtype == 6 || dtype == 15; }

// False where a tensor has no key: no memory of its own, or too many dimensions. `cast_to` is the dtype that autocast
// will give it, or -1: the strides stay.
bool add(Key& key, Tensor t, int32_t cast_to) {
  const Described x(t);
  void* data = nullptr;
  if (x.failed || x.rank > kMostRank || f.aoti_torch_get_data_ptr(t, &data) || !data) return false;
  key.add(x.rank), key.add(cast_to >= 0 && is_cast(x.dtype) ? cast_to : x.dtype), key.add(x.device * 256 + x.index);
  for (int64_t d = 0; d < x.rank; d++) key.add(x.sizes[d]), key.add(x.strides[d]);
  return true;
}

// PyTorch's flags that choice depends on, each in bits of its own.
int64_t flags(bool cpu) {
  void* context = f._ZN2at13globalContextEv();
  auto* const precision_of = f._ZNK2at7Context16float32PrecisionENS_14Float32BackendENS_9Float32OpE;
  auto precision = [&](int operation) { return int64_t(precision_of(context, cpu ? 2 : 1, operation)); };
  return int64_t(f._ZNK2at7Context23deterministicAlgorithmsEv(context)) |
         f._ZNK2at7Context14benchmarkCuDNNEv(context) << 1 | f._ZNK2at7Context17userEnabledMkldnnEv(context) << 2 |
         f._ZNK2at7Context16userEnabledCuDNNEv(context) << 3 | f._ZNK2at7Context18deterministicCuDNNEv(context) << 4 |
         precision(1) << 8 | precision(3) << 16;  // of MKLDNN's or CUDA's convolutions and matrix products
}

bool make_key(Call& c, int32_t cast_to = -1) {
  Key& key = c.key;
  key.count = 0;
  key.add(is_backward(c.op));
  for (Tensor t : c.tensors)
    if (!(t ? add(key, t, cast_to) : key.add(-1))) return false;
  uint32_t threads = 0;
  f.torch_get_num_threads(&threads);
  bool fits = add(key, c.stride) & add(key, c.padding) & add(key, c.dilation) & add(key, c.output_padding);
  key.add(c.transposed), key.add(c.groups), key.add(threads), key.add(flags(c.on_cpu()));
  if (is_backward(c.op)) {
    key.add(c.mask[0] | c.mask[1] << 1 | c.mask[2] << 2);
    fits &= c.mask[2] && c.has_bias_sizes ? add(key, c.bias_sizes) : key.add(-1);
  }
  return fits && key.complete();
}

// ---- computing ----------------------------------------------------------------------------------------------

Failed by_pytorch(Call& c, const int32_t mask[3], Tensor results[3]) {
  const bool cpu = c.on_cpu() || !f.aoti_torch_cuda_convolution;
  auto* forward = cpu ? f.aoti_torch_cpu_convolution : f.aoti_torch_cuda_convolution;
  auto* backward = cpu ? f.aoti_torch_cpu_convolution_backward : f.aoti_torch_cuda_convolution_backward;
  const Ints &s = c.stride, &p = c.padding, &d = c.dilation, &o = c.output_padding;
  const Inside here;
  if (is_backward(c.op)) {
    const int64_t* sizes = c.bias_sizes.values;
    return backward(c.tensors[0], c.tensors[1], c.tensors[2], c.has_bias_sizes ? &sizes : nullptr, c.bias_sizes.count,
                      s.values, s.count, p.values, p.count, d.values, d.count, c.transposed, o.values, o.count,
                      c.groups, mask, 3, &results[0], &results[1], &results[2]);
  }
  return forward(c.tensors[0], c.tensors[1], c.tensors[2] ? &c.tensors[2] : nullptr, s.values, s.count, p.values,
                 p.count, d.values, d.count, c.transposed, o.values, o.count, c.groups, &results[0]);
}

void release(Tensor results[3]) {
  for (int i = 0; i < 3; i++)
    if (results[i]) f.aoti_torch_delete_tensor_object(results[i]), results[i] = nullptr;
}

const void* address(Tensor t) {
  void* data = nullptr;
  if (t) f.aoti_torch_get_data_ptr(t, &data);
  return data;
}

// Launch on PyTorch's current stream of the device, with scratch memory from its allocator.
Failed launch(const Launches& l, const convgrad_tensors& t, int32_t device, int32_t index) {
  constexpr int kTensors = sizeof(t) / sizeof(void*);
  constexpr int32_t kBytes = 0;  // torch.uint8
  void *slots[kTensors + Launches::kMost] = {}, *stream = nullptr;
  memcpy(slots, &t, sizeof t);
  Tensor scratch[3] = {};
  const int64_t one = 1;
  Failed failed = device == kCpu ? 0 : f.aoti_torch_get_current_cuda_stream(index, &stream);
  for (int i = 0; i < l.scratches && !failed; i++) {
    failed = f.aoti_torch_empty_strided(1, &l.scratch_bytes[i], &one, kBytes, device, index, &scratch[i]);
    if (!failed) slots[kTensors + i] = const_cast<void*>(address(scratch[i]));
  }
  if (!failed) failed = convgrad_cuda_launch(l.launches, l.count, slots, stream);
  release(scratch);
  return failed;
}

// The operands as plans read them: those of the call, or dense copies.
struct Dense {
  Tensor tensors[3], copies[3] = {};
  Dense(const Call& c, const Entry& e) : tensors{c.tensors[0], c.tensors[1], c.tensors[2]} {
    for (int i = 0; i < 3; i++)
      if (e.copied >> i & 1) failed |= copy(tensors[i], e.channels_last, &copies[i]), tensors[i] = copies[i];
  }
  ~Dense() { release(copies); }
  Failed failed = 0;

 private:
  static Failed copy(Tensor t, bool channels_last, Tensor* result) {
    const Described x(t);
    int64_t strides[kMostRank], step = 1;
    if (x.failed) return 1;
    if (channels_last) strides[1] = 1, step = x.sizes[1];
    for (int64_t d = x.rank - 1; d >= (channels_last ? 2 : 0); d--) strides[d] = step, step *= x.sizes[d];
    if (channels_last) strides[0] = step;
    return f.aoti_torch_empty_strided(x.rank, x.sizes, strides, x.dtype, x.device, x.index, result) ||
           f.aoti_torch_copy_(*result, t, 0);
  }
};

Failed by_plan(const Call& c, const Tensor operands[3], const Entry& e, const Step& step, Tensor results[3]) {
  const Described x(c.tensors[0]);
  void* into[3] = {};
  for (int i = 0; i < 3; i++) {
    if (!(step.results >> i & 1)) continue;
    const ResultShape& r = e.results[i];
    if (f.aoti_torch_empty_strided(r.rank, r.sizes, r.strides, x.dtype, x.device, x.index, &results[i])) return 1;
    into[i] = const_cast<void*>(address(results[i]));
  }
  const void *a = address(operands[0]), *b = address(operands[1]), *last = address(operands[2]);
  // A transposed convolution is the plain one whose grad_input it is: input and grad_output change places.
  convgrad_tensors t = {};
  if (is_backward(c.op)) {
    t.input = c.transposed ? a : b, t.grad_output = c.transposed ? b : a, t.weight = last;
    (c.transposed ? t.forward : t.grad_input) = into[0], t.grad_weight = into[1], t.grad_bias = into[2];
  } else {
    (c.transposed ? t.grad_output : t.input) = a, t.weight = b, t.bias = last;
    (c.transposed ? t.grad_input : t.forward) = into[0];
  }
  return step.kind == kCuda ? launch(step.cuda, t, x.device, x.index) : convgrad_plan_run(&step.plan, &t);
}

Value list_of(const Ints& ints) {
  List list = nullptr;
  f.torch_new_list_reserve_size(static_cast<size_t>(ints.count), &list);
  for (int64_t i = 0; i < ints.count; i++) f.torch_list_push_back(list, static_cast<Value>(ints.values[i]));
  return reinterpret_cast<Value>(list);
}

Value new_handle(Tensor t) {
  Tensor handle = nullptr;
  f.aoti_torch_new_tensor_handle(t, &handle);
  return reinterpret_cast<Value>(handle);
}

// The sum of grad_output over batch and space, by aten::sum.
Failed sum_of_bias(const Call& c, Tensor* result) {
  Ints dims;
  for (int64_t d = 0; d < Described(c.tensors[0]).rank; d++)
    if (d != 1) dims.values[dims.count++] = d;
  Value stack[4] = {new_handle(c.tensors[0]), reinterpret_cast<Value>(new Value(list_of(dims))), 0, 0};
  if (f.torch_call_dispatcher("aten::sum", "dim_IntList", stack, f.aoti_torch_abi_version())) return 1;
  *result = reinterpret_cast<Tensor>(stack[0]);
  return 0;
}

Failed by_entry(Call& c, const Entry& e, Tensor results[3]) {
  if (e.steps == 0) return by_pytorch(c, c.mask, results);
  const Dense dense(c, e);
  if (dense.failed) return dense.failed;
  for (int i = 0; i < e.steps; i++) {
    const Step& step = e.step()[i];
    Failed failed;
    if (step.kind == kNative || step.kind == kCuda) {
      failed = by_plan(c, dense.tensors, e, step, results);
    } else if (step.kind == kSumOfBias) {
      failed = sum_of_bias(c, &results[2]);
    } else {
      int32_t mask[3];
      Tensor own[3] = {};
      for (int k = 0; k < 3; k++) mask[k] = step.results >> k & 1;
      failed = by_pytorch(c, mask, own);
      for (int k = 0; k < 3; k++)
        if (mask[k]) results[k] = own[k], own[k] = nullptr;
      release(own);
    }
    if (failed) return failed;
  }
  return 0;
}

// ---- Python -------------------------------------------------------------------------------------------------

struct Gil {
  int state = f.PyGILState_Ensure();
  ~Gil() { f.PyGILState_Release(state); }
};

Object* none() {
  f.Py_IncRef(f._Py_NoneStruct);
  return f._Py_NoneStruct;
}

Object* tuple_of(const Ints& ints) {
  Object* tuple = f.PyTuple_New(ints.count);
  for (int64_t i = 0; i < ints.count; i++) f.PyTuple_SetItem(tuple, i, f.PyLong_FromLongLong(ints.values[i]));
  return tuple;
}

Object* wrapped(Tensor t) { return t ? f._Z16THPVariable_WrapRKN2at10TensorBaseE(t) : none(); }

// The bytes that Python needs to store an entry: the generation of the table, and the key.
Object* bytes_of(const Key& key, int64_t generation) {
  int64_t values[Key::kMost + 1] = {generation};
  memcpy(values + 1, key.values, key.bytes());
  return f.PyBytes_FromStringAndSize(reinterpret_cast<const char*>(values),
                                     static_cast<intptr_t>(key.bytes() + sizeof(int64_t)));
}

// The tensor in a Python object, which owns it; null for None.
Tensor tensor_in(Object* object) {
  if (object == f._Py_NoneStruct) return nullptr;
  return reinterpret_cast<Tensor>(reinterpret_cast<char*>(object) + tensor_offset);
}

struct Failure : std::exception {
  const char* what() const noexcept override { return "a convolution failed while Python was shut down"; }
};

// Compute a call in Python: callback(op, key or None, *arguments of the operator). Throws what Python raised.
void by_python(Call& c, bool has_key, int64_t generation, Tensor results[3]) {
  if (!f.Py_IsInitialized()) {
    if (by_pytorch(c, c.mask, results)) throw Failure();
    return;
  }
  const Gil gil;
  const Inside here;
  const bool backward = is_backward(c.op);
  Object* arguments = f.PyTuple_New(backward ? 13 : 11);
  int at = 0;
  auto give = [&](Object* object) { f.PyTuple_SetItem(arguments, at++, object); };
  give(f.PyLong_FromLongLong(c.op));
  give(has_key ? bytes_of(c.key, generation) : none());
  for (Tensor t : c.tensors) give(wrapped(t));
  if (backward) give(c.has_bias_sizes ? tuple_of(c.bias_sizes) : none());
  give(tuple_of(c.stride)), give(tuple_of(c.padding)), give(tuple_of(c.dilation));
  give(f.PyBool_FromLong(c.transposed)), give(tuple_of(c.output_padding)), give(f.PyLong_FromLongLong(c.groups));
  if (backward) {
    Object* mask = f.PyTuple_New(3);
    for (int i = 0; i < 3; i++) f.PyTuple_SetItem(mask, i, f.PyBool_FromLong(c.mask[i]));
    give(mask);
  }
  Object* result = f.PyObject_CallObject(callback, arguments);
  f.Py_DecRef(arguments);
  if (!result) throw python_error();
  for (int i = 0; i < (backward ? 3 : 1); i++)
    if (Tensor t = tensor_in(backward ? f.PyTuple_GetItem(result, i) : result))
      f.aoti_torch_new_tensor_handle(t, &results[i]);
  f.Py_DecRef(result);
}

// ---- the kernels ----------------------------------------------------------------------------------------------

// The results of a call, by the table, by PyTorch or by Python. A result that was not asked for stays null.
void compute(Call& c, Tensor results[3]) {
  const bool others = is_pytorchs(c.op) && others_kernels.load(std::memory_order_relaxed);
  const bool observed = told.load(std::memory_order_relaxed) || f._ZN5torch8profiler4impl15profilerEnabledEv();
  const bool not_here = inside || python_inside || !(observed || taken_over.load(std::memory_order_relaxed));
  const bool pytorchs = is_pytorchs(c.op) && not_here;
  bool has_key = false;
  if (pytorchs && !others) {
    // An empty batch without sizes of the bias would end the process in PyTorch's kernel; Python states them.
    const bool ends = is_backward(c.op) && c.mask[2] && !c.has_bias_sizes;
    if (!ends && !by_pytorch(c, c.mask, results)) return;
    release(results);
  } else if (!pytorchs && (has_key = make_key(c)) && !observed) {
    const Table::Found found = table.find(c.key);
    const Entry* const entry = entry_of(found);
    if (entry && !(entry->steps == 0 && others)) {
      if (!by_entry(c, *entry, results)) return;
      release(results);  // Python raises the error in its own type
    }
  }
  by_python(c, has_key, table.generation(), results);
}

void read(Value value, Ints& into) {
  const List list = reinterpret_cast<List>(value);
  size_t count = 0;
  f.torch_list_size(list, &count);
  into.fits = count <= sizeof(into.values) / sizeof(*into.values);
  into.count = into.fits ? static_cast<int64_t>(count) : 0;
  for (int64_t i = 0; i < into.count; i++) {
    Value item = 0;
    f.torch_list_get_item(list, static_cast<size_t>(i), &item);
    into.values[i] = static_cast<int64_t>(item);
  }
  f.torch_delete_list(list);
}

Tensor optional_tensor(Value value) {
  if (!value) return nullptr;
  auto* inner = reinterpret_cast<Value*>(value);
  const Tensor t = reinterpret_cast<Tensor>(*inner);
  delete inner;
  bool defined = false;
  f.aoti_torch_is_defined(t, &defined);
  if (defined) return t;
  f.aoti_torch_delete_tensor_object(t);  // a bias of None arrives as an undefined tensor
  return nullptr;
}

template <int op>
void kernel(Value* stack, uint64_t, uint64_t) {
  Call c;
  c.op = op;
  Tensor results[3] = {};
  int at = 0;
  c.tensors[0] = reinterpret_cast<Tensor>(stack[at++]);
  c.tensors[1] = reinterpret_cast<Tensor>(stack[at++]);
  if (is_backward(op)) {
    c.tensors[2] = reinterpret_cast<Tensor>(stack[at++]);
    if (op == kConvolutionBackward) {
      if (auto* sizes = reinterpret_cast<Value*>(stack[at++])) {
        c.has_bias_sizes = true;
        read(*sizes, c.bias_sizes);
        delete sizes;
      }
    }
  } else {
    c.tensors[2] = optional_tensor(stack[at++]);
  }
  read(stack[at++], c.stride), read(stack[at++], c.padding), read(stack[at++], c.dilation);
  c.transposed = stack[at++] & 1;
  read(stack[at++], c.output_padding);
  c.groups = static_cast<int64_t>(stack[at++]);
  if (is_backward(op)) {
    Ints mask;
    read(stack[at++], mask);
    for (int i = 0; i < 3; i++) c.mask[i] = mask.values[i] & 1;
    if (op == kOverrideableBackward && c.mask[2]) {  // its schema has no sizes; they follow from grad_output
      int64_t* sizes;
      f.aoti_torch_get_sizes(c.tensors[0], &sizes);
      c.has_bias_sizes = true, c.bias_sizes.count = 1, c.bias_sizes.values[0] = sizes[1];
    }
  }
  compute(c, results);
  for (int i = 0; i < (is_backward(op) ? 3 : 1); i++) {
    if (!results[i]) f.aoti_torch_new_uninitialized_tensor(&results[i]);
    stack[i] = reinterpret_cast<Value>(results[i]);
  }
}

// ---- a call from Python -----------------------------------------------------------------------------------------

bool is_a(Object* object, Object* type) {
  Object* own = f.PyObject_Type(object);
  f.Py_DecRef(own);
  return own == type;
}

// An integer for each dimension, or one for all; false for anything else, which Python reads.
bool read(Object* object, int64_t d, Ints& into) {
  into.count = d;
  if (is_a(object, f.PyLong_Type)) {
    const long long value = f.PyLong_AsLongLong(object);
    for (int64_t i = 0; i < d; i++) into.values[i] = value;
  } else if (is_a(object, f.PyTuple_Type) && f.PyTuple_Size(object) == d) {
    for (int64_t i = 0; i < d; i++) {
      Object* item = f.PyTuple_GetItem(object, i);
      if (!is_a(item, f.PyLong_Type)) return false;
      into.values[i] = f.PyLong_AsLongLong(item);
    }
  } else {
    return false;
  }
  if (!f.PyErr_Occurred()) return true;
  f.PyErr_Clear();  // more than 64 bits
  return false;
}

// The call recorded by PyTorch's autograd: aten::convolution_overrideable, whose kernels are those above.
Failed recorded_call(const Call& c, Tensor* result) {
  Value* bias = c.tensors[2] ? new Value(new_handle(c.tensors[2])) : nullptr;
  Value stack[9] = {new_handle(c.tensors[0]), new_handle(c.tensors[1]),  reinterpret_cast<Value>(bias),
                    list_of(c.stride),        list_of(c.padding),        list_of(c.dilation),
                    static_cast<Value>(c.transposed), list_of(c.output_padding), static_cast<Value>(c.groups)};
  if (f.torch_call_dispatcher("aten::convolution_overrideable", "", stack, f.aoti_torch_abi_version())) return 1;
  *result = reinterpret_cast<Tensor>(stack[0]);
  return 0;
}

// Returns whether a tensor's values are the negative of those in its memory: the imaginary part of a conjugate.
// PyTorch's dispatcher makes a copy of such a tensor for a kernel.
bool is_negated(Object* tensor) {
  if (tensor == f._Py_NoneStruct) return false;
  Object* answer = f.PyObject_CallMethod(tensor, "is_neg", nullptr);
  if (!answer) f.PyErr_Clear();
  else f.Py_DecRef(answer);
  return answer != f._Py_FalseStruct;
}

// The order of the arguments after the operands: stride, padding, dilation, groups; stride, padding,
// output_padding, groups, dilation; stride, padding, dilation, transposed, output_padding, groups.
enum Written { kPlain = 0, kTransposed = 1, kGeneral = 2 };

// False for anything that Python must read.
bool read(Object* written, int how, int64_t d, Call& c) {
  auto item = [&](int i) { return f.PyTuple_GetItem(written, i); };
  static const int dilation[] = {2, 4, 2}, output_padding[] = {-1, 2, 4}, groups[] = {3, 3, 5};
  c.transposed = how == kTransposed || (how == kGeneral && item(3) == f._Py_TrueStruct);
  if (how == kGeneral && !c.transposed && item(3) != f._Py_FalseStruct) return false;
  c.output_padding.count = d;
  for (int64_t i = 0; i < d; i++) c.output_padding.values[i] = 0;
  Ints one;
  if (!read(item(0), d, c.stride) || !read(item(1), d, c.padding) || !read(item(dilation[how]), d, c.dilation) ||
      !is_a(item(groups[how]), f.PyLong_Type) || !read(item(groups[how]), 1, one))
    return false;
  if (how != kPlain && !read(item(output_padding[how]), d, c.output_padding)) return false;
  for (int64_t i = 0; i < d; i++)
    if (c.padding.values[i] < 0) return false;  // a crop, which the operator takes as low and high of each dimension
  c.groups = one.values[0];
  return true;
}

// The dtype that autocast casts to on a device; -1 where it is off.
int32_t autocast_dtype(int8_t device) {
  return f._ZN2at8autocast19is_autocast_enabledEN3c1010DeviceTypeE(device)
             ? f._ZN2at8autocast18get_autocast_dtypeEN3c1010DeviceTypeE(device)
             : -1;
}

// Make the operands those that autocast gives PyTorch's convolution; it casts a weight once in its block. May throw.
void cast_operands(Call& c, int32_t dtype, int8_t device) {
  Tensor given[3] = {c.tensors[0], c.tensors[1], c.tensors[2]};
  memset(c.tensors, 0, sizeof c.tensors);
  c.owns = true;
  for (int i = 0; i < 3; i++) {
    if (!given[i]) continue;
    auto* cast = new Returned(f._ZN2at8autocast11cached_castEN3c1010ScalarTypeERKNS_6TensorENS1_10DeviceTypeE(
        static_cast<int8_t>(dtype), given[i], device));
    c.tensors[i] = reinterpret_cast<Tensor>(cast);
  }
}

// call(how the arguments are written, dimensions or 0, recorded, input, weight, bias, arguments): a plain eager call.
// Returns the result; True where PyTorch's own function computes it, and its gradients, as well; the bytes of the key
// if the table does not have it; None if it has no key, or Python must be told of it.
Object* call(Object*, Object* const* args, intptr_t count) {
  const bool observed = told.load(std::memory_order_relaxed) || f._ZN5torch8profiler4impl15profilerEnabledEv();
  if (count != 7 || observed) return none();
  int64_t d = f.PyLong_AsLongLong(args[1]);
  const bool recorded = args[2] == f._Py_TrueStruct;
  Call c;
  c.op = kOverrideable;
  c.owns = false;
  for (int i = 0; i < 3; i++) c.tensors[i] = tensor_in(args[3 + i]);
  const Described input(c.tensors[0]), weight(c.tensors[1]);
  if (d == 0) d = weight.rank - 2;
  if (d < 1 || d > 3 || input.rank != d + 2 || weight.rank != d + 2) return none();
  if (!read(args[6], static_cast<int>(f.PyLong_AsLongLong(args[0])), d, c)) return none();
  if (input.device != kCpu && input.device != kGpu) return none();
  const auto device = static_cast<int8_t>(input.device);
  const int32_t cast_to = autocast_dtype(device);
  if (!make_key(c, cast_to)) return none();
  Table::Found found = table.find(c.key);
  const Entry* entry = entry_of(found);
  if (!entry) return cast_to < 0 ? bytes_of(c.key, table.generation()) : none();
  if (entry->steps == 0 && (!recorded || entry->pytorchs_autograd)) return f.PyBool_FromLong(1);
  if (!recorded && (is_negated(args[3]) || is_negated(args[4]) || is_negated(args[5]))) return none();
  Tensor results[3] = {};
  void* state = f.PyEval_SaveThread();
  Failed failed = 1;
  try {
    if (cast_to >= 0) {  // what was cast may lie otherwise
      cast_operands(c, cast_to, device);
      found = make_key(c) ? table.find(c.key) : Table::Found();
      entry = entry_of(found);
    }
    if (entry) failed = recorded ? recorded_call(c, &results[0]) : by_entry(c, *entry, results);
  } catch (const std::exception&) {  // of a cast: no memory
  }
  f.PyEval_RestoreThread(state);
  if (failed) {
    release(results);
    if (f.PyErr_Occurred()) return nullptr;  // raised by a hook of saved tensors, as that of a checkpoint does
    return none();  // Python computes it once more, and raises the error in its own type
  }
  Object* result = wrapped(results[0]);
  release(results);
  return result;
}

// PyMethodDef.
struct Method {
  const char* name;
  Object* (*function)(Object*, Object* const*, intptr_t);
  int flags;
  const char* doc;
} method = {"call", call, 0x80 /* METH_FASTCALL */, nullptr};

// The table's lock is held over each fork. The C library calls these after all of Python's hooks, so that no thread
// waits for the lock while it has what a hook waits for.
void lock_table() { table.mutex().lock(); }
void unlock_table() { table.mutex().unlock(); }
[[maybe_unused]] const int over_forks = pthread_atfork(lock_table, unlock_table, unlock_table);

}  // namespace
}  // namespace aten

python_error::python_error() { aten::f.PyErr_Fetch(&type, &value, &traceback); }

python_error::~python_error() {
  if (!type && !value && !traceback) return;
  const aten::Gil gil;
  for (aten::Object* object : {type, value, traceback})
    if (object) aten::f.Py_DecRef(object);
}

// ---- what engine/cache.py calls, with the GIL ---------------------------------------------------------------------

// The names whose addresses `convgrad_aten_open` takes, in their order.
CONVGRAD_EXPORT const char* convgrad_aten_names(void) { return aten::names; }

// Python's function for one call; `offset` is that of the at::Tensor in a Python object, `computes` is called for what
// the table does not have.
CONVGRAD_EXPORT aten::Object* convgrad_aten_open(const void* addresses, int64_t offset, aten::Object* computes) {
  memcpy(&aten::f, addresses, sizeof aten::f);
  aten::tensor_offset = static_cast<size_t>(offset);
  aten::f.Py_IncRef(computes);
  aten::callback = computes;
  return aten::f.PyCFunction_NewEx(&aten::method, nullptr, nullptr);
}

// Register the kernels at a dispatch key, "CPU" or "CUDA": those of PyTorch's convolutions, or of the overrideable
// ones. Null if PyTorch refuses.
CONVGRAD_EXPORT void* convgrad_aten_register(const char* key, int32_t overrideable) {
  using namespace aten;
  LibraryHandle library = nullptr;
  if (f.aoti_torch_library_init_impl("aten", key, __FILE__, __LINE__, &library)) return nullptr;
  const uint64_t version = f.aoti_torch_abi_version();
  const char* names[2] = {overrideable ? "convolution_overrideable" : "convolution",
                          overrideable ? "convolution_backward_overrideable" : "convolution_backward"};
  Kernel* kernels[2] = {overrideable ? kernel<kOverrideable> : kernel<kConvolution>,
                        overrideable ? kernel<kOverrideableBackward> : kernel<kConvolutionBackward>};
  for (int i = 0; i < 2; i++) {
    if (f.torch_library_impl(library, names[i], kernels[i], version)) {
      f.aoti_torch_delete_library_object(library);
      return nullptr;
    }
  }
  return library;
}

CONVGRAD_EXPORT int32_t convgrad_aten_unregister(void* library) {
  return aten::f.aoti_torch_delete_library_object(static_cast<aten::LibraryHandle>(library));
}

// Count the blocks and observers, one more or one less.
CONVGRAD_EXPORT void convgrad_aten_told(int32_t more) { aten::told += more; }
CONVGRAD_EXPORT void convgrad_aten_taken_over(int32_t more) { aten::taken_over += more; }
CONVGRAD_EXPORT void convgrad_aten_others_kernels(int32_t are_there) { aten::others_kernels = are_there; }
// Sets whether PyTorch computes its own convolutions in this thread from now on, because Python computes a call.
CONVGRAD_EXPORT void convgrad_aten_inside(int32_t value) { aten::python_inside = value; }

// `key` is what Python was given for a call.
CONVGRAD_EXPORT void convgrad_aten_store(const char* key, int64_t key_bytes, const void* entry, int64_t entry_bytes) {
  aten::Key of_call;
  int64_t generation;
  const size_t bytes = static_cast<size_t>(key_bytes) - sizeof generation;
  memcpy(&generation, key, sizeof generation);
  memcpy(of_call.values, key + sizeof generation, bytes);
  of_call.count = static_cast<int>(bytes / sizeof(int64_t));
  aten::table.store(of_call, entry, static_cast<size_t>(entry_bytes), generation);
}

CONVGRAD_EXPORT void convgrad_aten_clear(void) { aten::table.clear(); }
CONVGRAD_EXPORT int64_t convgrad_aten_size(void) { return aten::table.size(); }
