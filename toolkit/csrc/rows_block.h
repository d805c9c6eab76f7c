// How a block of GPU threads divides a chunk of a row's columns, and what each of its threads does.
//
// It compiles for the CPU too, where a test runs the threads one after another.
#pragma once
#include "rows.h"

// The values of a thread are in registers only where every index is known to the compiler.
#ifdef __CUDA_ARCH__
#define ROWS_UNROLL _Pragma("unroll")
#else
#define ROWS_UNROLL
#endif

namespace rows {

constexpr int WARP = 32, THREADS = 256, WARPS = THREADS / WARP;
constexpr int PER_THREAD = 16;
constexpr int64_t CHUNK = THREADS * PER_THREAD;
constexpr int GROUP = 8;  // neighbouring columns of a thread; 16 bytes of bfloat16

ROWS_INLINE int64_t num_chunks(int64_t columns) { return (columns + CHUNK - 1) / CHUNK; }

// The column of a thread's i-th value, in the chunk.
ROWS_INLINE int64_t column_of(int thread, int i) {
  return (static_cast<int64_t>(i / GROUP) * THREADS + thread) * GROUP + i % GROUP;
}

ROWS_INLINE void convert(float value, float& out) { out = value; }
ROWS_INLINE void convert(double value, float& out) { out = static_cast<float>(value); }
ROWS_INLINE void convert(float value, double& out) { out = value; }
ROWS_INLINE void convert(double value, double& out) { out = value; }
ROWS_INLINE void convert(Bfloat16 value, float& out) { out = from_bfloat16(value); }
ROWS_INLINE void convert(Bfloat16 value, double& out) { out = from_bfloat16(value); }
ROWS_INLINE void convert(float value, Bfloat16& out) { out = to_bfloat16(value); }
ROWS_INLINE void convert(double value, Bfloat16& out) {
  out = to_bfloat16(static_cast<float>(value));
}

// As many values as are moved at once.
template <class Type>
struct alignas(16) Pack {
  Type values[16 / sizeof(Type)];
};

template <class Type>
ROWS_INLINE bool aligned(const Type* data) {
  return reinterpret_cast<uintptr_t>(data) % sizeof(Pack<Type>) == 0;
}

// Reads a thread's columns of a chunk; -inf stands where there are none.
template <class Type, class Real>
ROWS_INLINE void load_from(const Type* chunk, int64_t count, int thread,
                           Real (&values)[PER_THREAD]) {
  constexpr int WIDTH = sizeof(Pack<Type>) / sizeof(Type);
  const bool whole = aligned(chunk) && count == CHUNK;
  ROWS_UNROLL
  for (int i = 0; i < PER_THREAD; i += WIDTH) {
    const int64_t column = column_of(thread, i);
    if (whole) {
      const Pack<Type> pack = *reinterpret_cast<const Pack<Type>*>(chunk + column);
      ROWS_UNROLL
      for (int k = 0; k < WIDTH; k++) convert(pack.values[k], values[i + k]);
    } else {
      ROWS_UNROLL
      for (int k = 0; k < WIDTH; k++) {
        values[i + k] = -INFINITY;
        if (column + k < count) convert(chunk[column + k], values[i + k]);
      }
    }
  }
}

template <class Type, class Real>
ROWS_INLINE void store_to(Type* chunk, int64_t count, int thread,
                          const Real (&values)[PER_THREAD]) {
  constexpr int WIDTH = sizeof(Pack<Type>) / sizeof(Type);
  const bool whole = aligned(chunk) && count == CHUNK;
  ROWS_UNROLL
  for (int i = 0; i < PER_THREAD; i += WIDTH) {
    const int64_t column = column_of(thread, i);
    Pack<Type> pack;
    ROWS_UNROLL
    for (int k = 0; k < WIDTH; k++) convert(values[i + k], pack.values[k]);
    if (whole) {
      *reinterpret_cast<Pack<Type>*>(chunk + column) = pack;
    } else {
      ROWS_UNROLL
      for (int k = 0; k < WIDTH; k++)
        if (column + k < count) chunk[column + k] = pack.values[k];
    }
  }
}

template <class Real>
ROWS_INLINE void load(const void* data, int32_t type, int64_t first, int64_t count, int thread,
                      Real (&values)[PER_THREAD]) {
  if (type == ROWS_BFLOAT16)
    load_from(static_cast<const Bfloat16*>(data) + first, count, thread, values);
  else if (type == ROWS_FLOAT32)
    load_from(static_cast<const float*>(data) + first, count, thread, values);
  else
    load_from(static_cast<const double*>(data) + first, count, thread, values);
}

template <class Real>
ROWS_INLINE void store(void* data, int32_t type, int64_t first, int64_t count, int thread,
                       const Real (&values)[PER_THREAD]) {
  if (type == ROWS_BFLOAT16)
    store_to(static_cast<Bfloat16*>(data) + first, count, thread, values);
  else
    store_to(static_cast<Real*>(data) + first, count, thread, values);
}

struct Larger {
  template <class Real>
  ROWS_INLINE Real operator()(Real a, Real b) const {
    return b > a ? b : a;
  }
};

struct Sum {
  template <class Real>
  ROWS_INLINE Real operator()(Real a, Real b) const {
    return a + b;
  }
};

// Of teacher and student.
template <class Real>
ROWS_INLINE void thread_maxima(const Real (&teacher)[PER_THREAD], const Real (&student)[PER_THREAD],
                               Real (&maxima)[2]) {
  maxima[0] = maxima[1] = static_cast<Real>(LOWEST);
  ROWS_UNROLL
  for (int i = 0; i < PER_THREAD; i++) {
    maxima[0] = Larger()(maxima[0], teacher[i]);
    maxima[1] = Larger()(maxima[1], student[i]);
  }
}

template <class Real>
ROWS_INLINE void thread_statistics(const Real (&teacher)[PER_THREAD],
                                   const Real (&student)[PER_THREAD], const Real (&maxima)[2],
                                   Real inv_tau, Real (&sums)[5]) {
  sums[0] = sums[1] = sums[2] = sums[3] = sums[4] = 0;
  ROWS_UNROLL
  for (int i = 0; i < PER_THREAD; i++) {
    const Real y = student[i] - maxima[1];
    const StatisticsTerm<Real> term = statistics_term(teacher[i] - maxima[0], y, inv_tau);
    sums[0] += term.teacher_z;
    sums[1] += term.student_z;
    sums[2] += term.forward;
    sums[3] += term.reverse;
    sums[4] += inv_tau == Real(1) ? term.student_z : exponent(y);
  }
}

template <class Real>
ROWS_INLINE State<Real> block_state(const Real (&maxima)[2], const Real (&sums)[5]) {
  return {maxima[0], sums[0], maxima[1], sums[1], sums[2], sums[3], sums[4], 0};
}

template <int divergence, class Real>
ROWS_INLINE void thread_sums(const Real (&teacher)[PER_THREAD], const Real (&student)[PER_THREAD],
                             const Row<Real>& row, Real (&sums)[2]) {
  sums[0] = sums[1] = 0;
  ROWS_UNROLL
  for (int i = 0; i < PER_THREAD; i++) {
    const Sums<Real> term = sums_term<divergence>(teacher[i], student[i], row);
    sums[0] += term.value;
    sums[1] += term.mean;
  }
}

// Overwrites the student's logits; `label` is a column of the chunk, if it lies there.
template <int divergence, class Real>
ROWS_INLINE void thread_gradient(const Real (&teacher)[PER_THREAD], const Row<Real>& row,
                                 Real softcap, int64_t label, int thread,
                                 Real (&student)[PER_THREAD]) {
  ROWS_UNROLL
  for (int i = 0; i < PER_THREAD; i++) {
    const Real logit = student[i];
    const GradientTerm<Real> term = gradient_term<divergence>(teacher[i], logit, row);
    Real result = row.kd_factor * term.kd;
    if (row.ce_factor != Real(0)) result += row.ce_factor * (row.inv_tau == Real(1) ? term.q : ce_softmax(logit, row));
    if (column_of(thread, i) == label) result -= row.label_factor;
    if (softcap != Real(0)) {
      const Real ratio = logit / softcap;
      result *= Real(1) - ratio * ratio;
    }
    student[i] = result;
  }
}

// Adds the parts of a row's chunks to its state, in order, and takes the label's logit.
template <class Real>
ROWS_INLINE void merge_row(const RowsTile& tile, int64_t row, Real inv_tau, const int64_t* labels,
                           const State<Real>* partials, State<Real>* states) {
  const int64_t chunks = num_chunks(tile.columns);
  State<Real> state = states[row];
  for (int64_t chunk = 0; chunk < chunks; chunk++)
    merge(state, partials[row * chunks + chunk], inv_tau);
  const int64_t column = labels[row] - tile.first_column;
  if (column >= 0 && column < tile.columns) {
    const int64_t index = row * tile.student_stride + column;
    if (tile.student_type == ROWS_BFLOAT16)
      convert(static_cast<const Bfloat16*>(tile.student)[index], state.label);
    else
      state.label = static_cast<const Real*>(tile.student)[index];
  }
  states[row] = state;
}

template <class Real>
ROWS_INLINE void add_row(int64_t row, int64_t chunks, const Sums<Real>* partials,
                         Sums<Real>* sums) {
  Sums<Real> total = sums[row];
  for (int64_t chunk = 0; chunk < chunks; chunk++) {
    total.value += partials[row * chunks + chunk].value;
    total.mean += partials[row * chunks + chunk].mean;
  }
  sums[row] = total;
}

}  // namespace rows
