// What the CPU does with a chunk of a row's columns: loops that vectorise over values in the cache.
#pragma once
#include <algorithm>

#include "rows.h"

namespace rows {

constexpr int64_t CHUNK = 2048;

// One chunk of one row.
struct Piece {
  int64_t row, first, count;
};

int64_t num_chunks(const RowsTile& tile) { return (tile.columns + CHUNK - 1) / CHUNK; }

Piece piece_of(const RowsTile& tile, int64_t index) {
  const int64_t chunks = num_chunks(tile), first = index % chunks * CHUNK;
  return {index / chunks, first, std::min(CHUNK, tile.columns - first)};
}

template <class Real>
constexpr int32_t TYPE_OF = sizeof(Real) == sizeof(double) ? ROWS_FLOAT64 : ROWS_FLOAT32;

// Returns `count` logits from `first` on: in place, or converted into the buffer.
template <class Real>
ROWS_INLINE const Real* load(const void* data, int32_t type, int64_t first, int64_t count,
                             Real* buffer) {
  if (type == TYPE_OF<Real>) return static_cast<const Real*>(data) + first;
  if (type == ROWS_BFLOAT16) {
    const Bfloat16* source = static_cast<const Bfloat16*>(data) + first;
    for (int64_t i = 0; i < count; i++) buffer[i] = from_bfloat16(source[i]);
  } else if (type == ROWS_FLOAT32) {
    const float* source = static_cast<const float*>(data) + first;
    for (int64_t i = 0; i < count; i++) buffer[i] = static_cast<Real>(source[i]);
  } else {
    const double* source = static_cast<const double*>(data) + first;
    for (int64_t i = 0; i < count; i++) buffer[i] = static_cast<Real>(source[i]);
  }
  return buffer;
}

// A student's type is Real's own or bfloat16.
template <class Real>
ROWS_INLINE void store(void* data, int32_t type, int64_t first, int64_t count,
                       const Real* values) {
  if (type == ROWS_BFLOAT16) {
    Bfloat16* target = static_cast<Bfloat16*>(data) + first;
    for (int64_t i = 0; i < count; i++) target[i] = to_bfloat16(static_cast<float>(values[i]));
  } else {
    std::copy(values, values + count, static_cast<Real*>(data) + first);
  }
}

// The logits of a piece, in the type of the arithmetic.
template <class Real>
struct Logits {
  const Real *student, *teacher;
  Real student_buffer[CHUNK], teacher_buffer[CHUNK];

  ROWS_INLINE Logits(const RowsTile& tile, const Piece& piece)
      : student(load<Real>(tile.student, tile.student_type,
                           piece.row * tile.student_stride + piece.first, piece.count,
                           student_buffer)),
        teacher(load<Real>(tile.teacher, tile.teacher_type,
                           piece.row * tile.teacher_stride + piece.first, piece.count,
                           teacher_buffer)) {}
};

// The maxima of both models; several at a time, since each waits for the one before it.
template <class Real>
ROWS_INLINE void maxima(const Logits<Real>& logits, int64_t count, Real& teacher, Real& student) {
  const Real *teachers = logits.teacher, *students = logits.student;
  const int64_t half = count / 2;
  const Real lowest = static_cast<Real>(LOWEST);
  Real t0 = lowest, t1 = lowest, s0 = lowest, s1 = lowest;
#pragma omp simd reduction(max : t0, t1, s0, s1)
  for (int64_t i = 0; i < half; i++) {
    t0 = teachers[i] > t0 ? teachers[i] : t0;
    t1 = teachers[half + i] > t1 ? teachers[half + i] : t1;
    s0 = students[i] > s0 ? students[i] : s0;
    s1 = students[half + i] > s1 ? students[half + i] : s1;
  }
  if (count % 2) {
    t0 = std::max(t0, teachers[count - 1]);
    s0 = std::max(s0, students[count - 1]);
  }
  teacher = std::max(t0, t1);
  student = std::max(s0, s1);
}

template <class Real>
ROWS_INLINE State<Real> statistics_of(const RowsTile& tile, const Piece& piece, Real inv_tau) {
  const Logits<Real> logits(tile, piece);
  const Real *student = logits.student, *teacher = logits.teacher;
  Real teacher_max, student_max;
  maxima(logits, piece.count, teacher_max, student_max);
  Real teacher_z = 0, student_z = 0, forward = 0, reverse = 0, ce_z = 0;
#pragma omp simd reduction(+ : teacher_z, student_z, forward, reverse)
  for (int64_t i = 0; i < piece.count; i++) {
    const StatisticsTerm<Real> term =
        statistics_term(teacher[i] - teacher_max, student[i] - student_max, inv_tau);
    teacher_z += term.teacher_z;
    student_z += term.student_z;
    forward += term.forward;
    reverse += term.reverse;
  }
  if (inv_tau == Real(1)) {
    ce_z = student_z;
  } else {
#pragma omp simd reduction(+ : ce_z)
    for (int64_t i = 0; i < piece.count; i++) ce_z += exponent(student[i] - student_max);
  }
  return {teacher_max, teacher_z, student_max, student_z, forward, reverse, ce_z, 0};
}

template <int divergence, class Real>
ROWS_INLINE Sums<Real> divergence_sums(const Logits<Real>& logits, int64_t count, const Row<Real>& row) {
  const Real *student = logits.student, *teacher = logits.teacher;
  Real value = 0, mean = 0;
#pragma omp simd reduction(+ : value, mean)
  for (int64_t i = 0; i < count; i++) {
    const Sums<Real> term = sums_term<divergence>(teacher[i], student[i], row);
    value += term.value;
    mean += term.mean;
  }
  return {value, mean};
}

template <int divergence, class Real>
ROWS_INLINE void kd_gradient(const Logits<Real>& logits, int64_t count, const Row<Real>& row,
                             Real* out) {
  const Real *student = logits.student, *teacher = logits.teacher;
  const Real ce_factor = row.inv_tau == Real(1) ? row.ce_factor : Real(0);
#pragma omp simd
  for (int64_t i = 0; i < count; i++) {
    const GradientTerm<Real> term = gradient_term<divergence>(teacher[i], student[i], row);
    out[i] = row.kd_factor * term.kd + ce_factor * term.q;
  }
}

// What does not depend on the divergence; kd_gradient has added softmax(zs) for temperature 1.
template <class Real>
ROWS_INLINE void finish_gradient(const Real* student, int64_t count, int64_t label,
                                 const Row<Real>& row, Real softcap, Real* out) {
  if (row.inv_tau != Real(1) && row.ce_factor != Real(0)) {
#pragma omp simd
    for (int64_t i = 0; i < count; i++) out[i] += row.ce_factor * ce_softmax(student[i], row);
  }
  if (label >= 0 && label < count) out[label] -= row.label_factor;
  if (softcap != Real(0)) {
#pragma omp simd
    for (int64_t i = 0; i < count; i++) {
      const Real ratio = student[i] / softcap;
      out[i] *= Real(1) - ratio * ratio;
    }
  }
}

template <class Real>
ROWS_INLINE Sums<Real> sums_of_piece(const RowsTile& tile, const Piece& piece,
                                     const RowsObjective& objective,
                                     const Constants<Real>& constants) {
  const Logits<Real> logits(tile, piece);
  const Row<Real> row = row_of(objective, constants, Real(0), Real(1));
  switch (objective.divergence) {
#define ROWS_CASE(divergence) \
  case divergence:            \
    return divergence_sums<divergence>(logits, piece.count, row);
    ROWS_SECOND_PASS(ROWS_CASE)
#undef ROWS_CASE
    default:
      return {0, 0};
  }
}

template <class Real>
ROWS_INLINE void gradient_of_piece(const RowsTile& tile, const Piece& piece,
                                   const RowsObjective& objective, int64_t label,
                                   const Constants<Real>& constants, Real mean, Real weight) {
  const Logits<Real> logits(tile, piece);
  const Row<Real> row = row_of(objective, constants, mean, weight);
  Real out[CHUNK];
  switch (objective.divergence) {
#define ROWS_CASE(divergence)                                \
  case divergence:                                           \
    kd_gradient<divergence>(logits, piece.count, row, out); \
    break;
    ROWS_FIRST_PASS(ROWS_CASE)
    ROWS_SECOND_PASS(ROWS_CASE)
#undef ROWS_CASE
  }
  finish_gradient(logits.student, piece.count, label, row, static_cast<Real>(objective.softcap),
                  out);
  store(tile.student, tile.student_type, piece.row * tile.student_stride + piece.first,
        piece.count, out);
}

}  // namespace rows
