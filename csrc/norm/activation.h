// Activations of vectors: the value at z, and the gradient that they hand on; at every edge, infinity and NaN as
// PyTorch has them.
#pragma once

#include "../convgrad_native.h"
#include "../vectors/vector.h"

namespace {

// The Taylor series of the exponential function, known to the compiler at any level of optimization.
template <class T, int Degree>
struct ExponentialSeries {
  T of[Degree + 1] = {};

  constexpr ExponentialSeries() {
    T factorial = 1;
    for (int k = 0; k <= Degree; ++k) of[k] = 1 / factorial, factorial *= T(k + 1);
  }
};

// e^v to within 2 units in the last place: 2^n e^r with |r| <= ln(2) / 2, where the Taylor series needs few terms.
// Below the smallest normal number it is that; within ln(2) / 2 of the largest number, and above, infinity.
template <class T, int N>
inline Vec<T, N> exponential(Vec<T, N> v) {
  typedef Vec<T, N> V;
  constexpr bool is_float = sizeof(T) == 4;
  constexpr int bits = is_float ? 23 : 52, bias = is_float ? 127 : 1023, degree = is_float ? 7 : 13;
  constexpr T to_integer = is_float ? 0x1.8p23 : 0x1.8p52, ln2 = 0.693147180559945309;
  constexpr T high = is_float ? 0x1.63p-1 : 0x1.62e42feep-1;  // n * high is exact
  constexpr T low = is_float ? -0x1.bd0105c610ca8p-13 : 0x1.a39ef35793c76p-33;
  const V least = V{} + (1 - bias) * ln2, most = V{} + (1 + bias) * ln2;
  v = v < least ? least : v, v = v > most ? most : v;  // a NaN stays one
  const V shifted = v * T(1.44269504088896341) + to_integer, n = shifted - to_integer, r = (v - n * high) - n * low;
  constexpr ExponentialSeries<T, degree> series;
  V sum = V{} + series.of[degree];
#pragma GCC unroll 13
  for (int k = degree; k > 0; --k) sum = sum * r + series.of[k - 1];
  const Mask<T, N> exponent = bit_cast<Mask<T, N>>(shifted) - bit_cast<LaneInteger<T>>(to_integer) + bias;
  return sum * bit_cast<V>(exponent << bits);
}

struct Identity {
  static constexpr bool kCostly = false;  // more to compute than to write and read again

  template <class V>
  static V value(V z) { return z; }
  template <class V>
  static V gradient(V, V g) { return g; }
};

struct ReLU : Identity {
  template <class V>
  static V value(V z) { return z < 0 ? V{} : z; }
  template <class V>
  static V gradient(V z, V g) { return z <= 0 ? V{} : g; }
};

struct ReLU6 : Identity {
  template <class V>
  static V value(V z) {
    const V six = V{} + 6, positive = ReLU::value(z);
    return positive > 6 ? six : positive;
  }
  template <class V>
  static V gradient(V z, V g) { return z >= 6 ? V{} : ReLU::gradient(z, g); }
};

struct Hardswish : Identity {
  template <class V>
  static V value(V z) {
    const V sixth = (V{} + 1) / 6;  // six times that is 1
    return z * (ReLU6::value(z + 3) * sixth);
  }
  template <class V>
  static V gradient(V z, V g) {
    const V third = (V{} + 1) / 3, inside = g * (z * third + 0.5f);
    return z <= -3 ? V{} : z >= 3 ? g : inside;
  }
};

struct SiLU {
  static constexpr bool kCostly = true;

  template <class V>
  static V value(V z) { return z / (1 + exp_of(-z)); }
  template <class V>
  static V gradient(V z, V g) {
    const V sigmoid = 1 / (1 + exp_of(-z));
    return g * sigmoid * (1 + z * (1 - sigmoid));
  }

 private:
  template <class V>
  static V exp_of(V v) {
    typedef typename std::remove_reference<decltype(v[0] + v[0])>::type T;
    return exponential<T, int(sizeof(V) / sizeof(T))>(v);
  }
};

// `body(the activation of this number)`.
template <class Body>
void with_activation(int32_t activation, const Body& body) {
  switch (activation) {
    case CONVGRAD_RELU: return body(ReLU());
    case CONVGRAD_RELU6: return body(ReLU6());
    case CONVGRAD_SILU: return body(SiLU());
    case CONVGRAD_HARDSWISH: return body(Hardswish());
    default: return body(Identity());
  }
}

}  // namespace
