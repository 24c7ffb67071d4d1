/* The C interface of the compiled CPU kernels: structs that describe a problem, and pointers.
 *
 * No torch header is needed on either side, so one build serves every torch. Every function is safe to call
 * from several threads at once. All sizes and offsets are 64 bits wide.
 */
#ifndef CONVGRAD_NATIVE_H
#define CONVGRAD_NATIVE_H

#include <stdint.h>

/* Raised whenever a struct, a signature or what a number stands for changes; the loader refuses another number. */
#define CONVGRAD_ABI 13

#ifdef __cplusplus
extern "C" {
#endif

enum { CONVGRAD_CONTIGUOUS = 0, CONVGRAD_CHANNELS_LAST = 1 };
/* What is read outside the input: zeros, or the input itself, at most its size away (reflect: less than that). */
enum { CONVGRAD_ZEROS = 0, CONVGRAD_CIRCULAR = 1, CONVGRAD_REFLECT = 2, CONVGRAD_REPLICATE = 3 };
enum { CONVGRAD_FLOAT32 = 0, CONVGRAD_FLOAT64 = 1, CONVGRAD_BFLOAT16 = 2, CONVGRAD_FLOAT16 = 3 };

enum { CONVGRAD_NO_ACTIVATION = 0, CONVGRAD_RELU = 1, CONVGRAD_RELU6 = 2, CONVGRAD_SILU = 3, CONVGRAD_HARDSWISH = 4 };

/* What to compute: a sum of these, in which forward and grad_input are not together. */
enum {
  CONVGRAD_FORWARD = 1,
  CONVGRAD_GRAD_INPUT = 2,
  CONVGRAD_GRAD_WEIGHT = 4,
  CONVGRAD_GRAD_BIAS = 8,            /* the sum of grad_output; only together with CONVGRAD_GRAD_WEIGHT */
  CONVGRAD_TRANSPOSED_GRAD_BIAS = 16 /* the sum of input instead, `channels` values: a transposed convolution's */
};

/* A depthwise convolution (more than one group, in_per_group 1), a grouped or dense one, or a pointwise one: kernel 1,
 * no padding. Spatial dimensions that a problem lacks come first, with size, kernel and stride 1. The weight has the
 * problem's layout. */
typedef struct {
  int64_t batch, groups, in_per_group, out_per_group;
  int64_t input[3], kernel[3], stride[3], padding[3], dilation[3], output[3]; /* padding: the low side */
  int32_t layout, dtype, outputs, threads, padding_mode;
} convgrad_problem;

/* The tensors; those that the requested outputs do not need may be null. `bias` is added to `forward` (a value
 * an output channel) or, where only grad_input is requested and the padding is zeros, to `grad_input` (a value an input
 * channel). */
typedef struct {
  const void *input, *weight, *grad_output, *bias;
  void *forward, *grad_input, *grad_weight, *grad_bias;
} convgrad_tensors;

/* All that is worked out once for a problem: which kernels compute it, its tiles, the size of its scratch memory. It
 * may be copied, and there is nothing to free. */
#define CONVGRAD_PLAN_BYTES 1536
typedef struct {
  int64_t content[CONVGRAD_PLAN_BYTES / 8];
} convgrad_plan;

int32_t convgrad_abi(void);

/* Name of the instruction set in use: "x86-64-v4", "x86-64-v3" or "baseline". */
const char *convgrad_instruction_set(void);

/* Whether this build, this processor and its system have an instruction set, "amx", whose kernels for float32 stand
 * beside those of x86-64-v4, or "winograd", whose kernels of 3x3 and 3 stand beside those of each. */
int32_t convgrad_has(const char *name);

/* Use another instruction set from now on (for tests); 0 if it is there, else 1. */
int32_t convgrad_select(const char *name);

/* Make a plan for what `convgrad_has` knows by this name; 0 on success, 1 for lack of it or an unknown dtype. Empty and
 * "winograd" mean the instruction set in use. */
int32_t convgrad_plan_make(const convgrad_problem *problem, const char *name, convgrad_plan *plan);

/* Which kernels it runs: "planar", "packed" (those of depthwise/packed.h), "grouped", "pointwise", "strided pointwise",
 * "amx" or "winograd". */
const char *convgrad_plan_name(const convgrad_plan *plan);

/* Compute the requested outputs; 0 on success, 1 for lack of memory. Scratch memory belongs to the calling thread,
 * which keeps it, unless it is large, for its next call. */
int32_t convgrad_plan_run(const convgrad_plan *plan, const convgrad_tensors *tensors);

/* Batch normalization by the statistics of the batch; its gradients where there is a grad_output. All tensors but
 * these three may be null: input, and the mean and the inverse standard deviation of the channels, which forward writes
 * and backward reads. Those two are float32, or float64 where the tensors are. In channels_last there are at least 16
 * channels. */
typedef struct {
  int64_t batch, channels, pixels;
  double epsilon, momentum;
  int32_t layout, dtype, threads, activation;
  int32_t wide; /* the channels' other values are float32 beside tensors of 16 bits */
  const void *input, *weight, *bias, *grad_output;
  void *mean, *invstd, *running_mean, *running_var;
  void *output; /* backward: the gradient of the input; where it is null, only those of weight and bias */
  void *grad_weight, *grad_bias;
} convgrad_norm;

/* 0 on success, 1 for an unknown dtype or lack of memory. */
int32_t convgrad_normalize(const convgrad_norm *norm);

#ifdef __cplusplus
}
#endif
#endif
