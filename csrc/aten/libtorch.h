// The functions of libtorch and of Python that the way in calls, by name.
//
// Python looks the addresses up and hands them over (`convgrad_aten_open`), so this library links neither PyTorch nor
// Python, needs no header of theirs, and one build serves every release. All but the C++ functions in
// LIBTORCH_QUESTIONS, which take and return words, are C functions: of PyTorch's C shim (torch/csrc/stable/c/shim.h,
// torch/csrc/inductor/aoti_torch/c/shim.h), and of Python's limited API.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace aten {

typedef struct OpaqueTensor* Tensor;  // AtenTensorHandle: points to an at::Tensor
typedef struct OpaqueList* List;
typedef struct OpaqueLibrary* LibraryHandle;
typedef struct OpaqueObject Object;  // PyObject
typedef uint64_t Value;              // StableIValue
typedef int32_t Failed;              // 0 for success

// An at::Tensor as a C++ function returns it: in memory, as its destructor is declared, which is never called.
struct Returned {
  void* implementation;
  ~Returned();
};

typedef void Kernel(Value* stack, uint64_t inputs, uint64_t outputs);

#define LIBTORCH_SHIM(F)                                                                                               \
  F(Failed, aoti_torch_library_init_impl, (const char*, const char*, const char*, uint32_t, LibraryHandle*))           \
  F(Failed, torch_library_impl, (LibraryHandle, const char*, Kernel*, uint64_t))                                       \
  F(Failed, aoti_torch_delete_library_object, (LibraryHandle))                                                         \
  F(uint64_t, aoti_torch_abi_version, ())                                                                              \
  F(Failed, torch_call_dispatcher, (const char*, const char*, Value*, uint64_t))                                       \
  F(Failed, torch_new_list_reserve_size, (size_t, List*))                                                              \
  F(Failed, torch_list_push_back, (List, Value))                                                                       \
  F(Failed, torch_list_size, (List, size_t*))                                                                          \
  F(Failed, torch_list_get_item, (List, size_t, Value*))                                                               \
  F(Failed, torch_delete_list, (List))                                                                                 \
  F(Failed, torch_get_num_threads, (uint32_t*))                                                                        \
  F(Failed, aoti_torch_new_tensor_handle, (Tensor, Tensor*))                                                           \
  F(Failed, aoti_torch_new_uninitialized_tensor, (Tensor*))                                                            \
  F(Failed, aoti_torch_delete_tensor_object, (Tensor))                                                                 \
  F(Failed, aoti_torch_is_defined, (Tensor, bool*))                                                                    \
  F(Failed, aoti_torch_get_dim, (Tensor, int64_t*))                                                                    \
  F(Failed, aoti_torch_get_sizes, (Tensor, int64_t**))                                                                 \
  F(Failed, aoti_torch_get_strides, (Tensor, int64_t**))                                                               \
  F(Failed, aoti_torch_get_dtype, (Tensor, int32_t*))                                                                  \
  F(Failed, aoti_torch_get_device_type, (Tensor, int32_t*))                                                            \
  F(Failed, aoti_torch_get_device_index, (Tensor, int32_t*))                                                           \
  F(Failed, aoti_torch_get_data_ptr, (Tensor, void**))                                                                 \
  F(Failed, aoti_torch_empty_strided, (int64_t, const int64_t*, const int64_t*, int32_t, int32_t, int32_t, Tensor*))   \
  F(Failed, aoti_torch_copy_, (Tensor, Tensor, int32_t))                                                               \
  F(Failed, aoti_torch_cpu_convolution,                                                                                \
    (Tensor, Tensor, Tensor*, const int64_t*, int64_t, const int64_t*, int64_t, const int64_t*, int64_t, int32_t,      \
     const int64_t*, int64_t, int64_t, Tensor*))                                                                       \
  F(Failed, aoti_torch_cpu_convolution_backward,                                                                       \
    (Tensor, Tensor, Tensor, const int64_t**, int64_t, const int64_t*, int64_t, const int64_t*, int64_t,               \
     const int64_t*, int64_t, int32_t, const int64_t*, int64_t, int64_t, const int32_t*, int64_t, Tensor*, Tensor*,    \
     Tensor*))

// at::globalContext, its flags, and its Float32Precision of a Float32Backend and a Float32Op; at::autocast's
// is_autocast_enabled, get_autocast_dtype and cached_cast; torch::profiler::impl::profilerEnabled; THPVariable_Wrap.
#define LIBTORCH_QUESTIONS(F)                                                                                          \
  F(void*, _ZN2at13globalContextEv, ())                                                                                \
  F(bool, _ZNK2at7Context23deterministicAlgorithmsEv, (void*))                                                         \
  F(bool, _ZNK2at7Context14benchmarkCuDNNEv, (void*))                                                                  \
  F(bool, _ZNK2at7Context17userEnabledMkldnnEv, (void*))                                                               \
  F(bool, _ZNK2at7Context16userEnabledCuDNNEv, (void*))                                                                \
  F(bool, _ZNK2at7Context18deterministicCuDNNEv, (void*))                                                              \
  F(int, _ZNK2at7Context16float32PrecisionENS_14Float32BackendENS_9Float32OpE, (void*, int, int))                      \
  F(bool, _ZN2at8autocast19is_autocast_enabledEN3c1010DeviceTypeE, (int8_t))                                           \
  F(int8_t, _ZN2at8autocast18get_autocast_dtypeEN3c1010DeviceTypeE, (int8_t))                                          \
  F(Returned, _ZN2at8autocast11cached_castEN3c1010ScalarTypeERKNS_6TensorENS1_10DeviceTypeE, (int8_t, Tensor, int8_t)) \
  F(bool, _ZN5torch8profiler4impl15profilerEnabledEv, ())                                                              \
  F(Object*, _Z16THPVariable_WrapRKN2at10TensorBaseE, (Tensor))

#define PYTHON_API(F)                                                                                                  \
  F(int, Py_IsInitialized, ())                                                                                         \
  F(int, PyGILState_Ensure, ())                                                                                        \
  F(void, PyGILState_Release, (int))                                                                                   \
  F(void*, PyEval_SaveThread, ())                                                                                      \
  F(void, PyEval_RestoreThread, (void*))                                                                               \
  F(void, Py_IncRef, (Object*))                                                                                        \
  F(void, Py_DecRef, (Object*))                                                                                        \
  F(Object*, PyObject_Type, (Object*))                                                                                 \
  F(Object*, PyObject_CallObject, (Object*, Object*))                                                                  \
  F(Object*, PyObject_CallMethod, (Object*, const char*, const char*, ...))                                            \
  F(Object*, PyTuple_New, (intptr_t))                                                                                  \
  F(int, PyTuple_SetItem, (Object*, intptr_t, Object*))                                                                \
  F(intptr_t, PyTuple_Size, (Object*))                                                                                 \
  F(Object*, PyTuple_GetItem, (Object*, intptr_t))                                                                     \
  F(Object*, PyLong_FromLongLong, (long long))                                                                         \
  F(long long, PyLong_AsLongLong, (Object*))                                                                           \
  F(Object*, PyBool_FromLong, (long))                                                                                  \
  F(Object*, PyBytes_FromStringAndSize, (const char*, intptr_t))                                                       \
  F(Object*, PyErr_Occurred, ())                                                                                       \
  F(void, PyErr_Clear, ())                                                                                             \
  F(void, PyErr_Fetch, (Object**, Object**, Object**))                                                                 \
  F(Object*, PyCFunction_NewEx, (void*, Object*, Object*))

// The addresses of Python objects.
#define PYTHON_OBJECTS(F) F(_Py_NoneStruct) F(_Py_TrueStruct) F(_Py_FalseStruct) F(PyLong_Type) F(PyTuple_Type)

// One pointer a name, in the order in which `names` lists them.
struct Functions {
#define CONVGRAD_POINTER(result, name, arguments) result(*name) arguments;
  LIBTORCH_SHIM(CONVGRAD_POINTER)
  LIBTORCH_QUESTIONS(CONVGRAD_POINTER)
  PYTHON_API(CONVGRAD_POINTER)
#undef CONVGRAD_POINTER
#define CONVGRAD_POINTER(name) Object* name;
  PYTHON_OBJECTS(CONVGRAD_POINTER)
#undef CONVGRAD_POINTER
  // In a build of PyTorch for CUDA; else null.
  decltype(aoti_torch_cpu_convolution) aoti_torch_cuda_convolution;
  decltype(aoti_torch_cpu_convolution_backward) aoti_torch_cuda_convolution_backward;
  Failed (*aoti_torch_get_current_cuda_stream)(int32_t, void**);
};

#define CONVGRAD_NAME(result, name, arguments) #name " "
#define CONVGRAD_OBJECT(name) #name " "
constexpr char names[] = LIBTORCH_SHIM(CONVGRAD_NAME) LIBTORCH_QUESTIONS(CONVGRAD_NAME) PYTHON_API(CONVGRAD_NAME)
    PYTHON_OBJECTS(CONVGRAD_OBJECT) "aoti_torch_cuda_convolution aoti_torch_cuda_convolution_backward "
                       "aoti_torch_get_current_cuda_stream";
#undef CONVGRAD_NAME
#undef CONVGRAD_OBJECT

}  // namespace aten
