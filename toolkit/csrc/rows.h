// The arithmetic of one row, the same on CPU and GPU; formulas in toolkit/losses/divergences.py.
//
// Differences of teacher and student are taken before the temperature divides them, so that equal
// logits differ by exactly 0 however the compiler fuses products and sums.
#pragma once
#include "rows_api.h"
#include "rows_math.h"

namespace rows {

constexpr double LOWEST = -1e30;  // maximum of an empty state

// What the sums over some columns are; the layout of a row of `state`.
template <class Real>
struct State {
  Real teacher_max, teacher_z, student_max, student_z, forward, reverse, ce_z, label;
};

template <class Real>
struct Constants {
  Real teacher_max, log_teacher_z, student_max, log_student_z, log_ce_z;
};

template <class Real>
struct Sums {
  Real value, mean;
};

// p * term, where 0 times anything is 0.
template <class Real>
ROWS_INLINE Real weighted(Real probability, Real term) {
  return probability == Real(0) ? Real(0) : probability * term;
}

// ---- statistics ----------------------------------------------------------------------------

template <class Real>
struct StatisticsTerm {
  Real teacher_z, student_z, forward, reverse;
};

// What a column adds to the state; both logits less their maxima.
template <class Real>
ROWS_INLINE StatisticsTerm<Real> statistics_term(Real teacher, Real student, Real inv_tau) {
  const Real exp_u = exponent(teacher * inv_tau), exp_v = exponent(student * inv_tau);
  const Real difference = (teacher - student) * inv_tau;
  return {exp_u, exp_v, weighted(exp_u, difference), -weighted(exp_v, difference)};
}

template <class Real>
ROWS_INLINE State<Real> recentred(const State<Real>& state, Real teacher_max, Real student_max,
                                  Real inv_tau) {
  const Real teacher_shift = (state.teacher_max - teacher_max) * inv_tau;
  const Real student_shift = (state.student_max - student_max) * inv_tau;
  const Real shift = teacher_shift - student_shift;
  const Real keep_p = exponent(teacher_shift), keep_q = exponent(student_shift);
  return {teacher_max,
          keep_p * state.teacher_z,
          student_max,
          keep_q * state.student_z,
          weighted(keep_p, state.forward + state.teacher_z * shift),
          weighted(keep_q, state.reverse - state.student_z * shift),
          exponent(state.student_max - student_max) * state.ce_z,
          state.label};
}

// Adds the columns of `part`, which the state must not hold yet.
template <class Real>
ROWS_INLINE void merge(State<Real>& state, const State<Real>& part, Real inv_tau) {
  const Real teacher_max =
      part.teacher_max > state.teacher_max ? part.teacher_max : state.teacher_max;
  const Real student_max =
      part.student_max > state.student_max ? part.student_max : state.student_max;
  const State<Real> old = recentred(state, teacher_max, student_max, inv_tau);
  const State<Real> more = recentred(part, teacher_max, student_max, inv_tau);
  state = {teacher_max,
           old.teacher_z + more.teacher_z,
           student_max,
           old.student_z + more.student_z,
           old.forward + more.forward,
           old.reverse + more.reverse,
           old.ce_z + more.ce_z,
           old.label + more.label};
}

template <class Real>
ROWS_INLINE Sums<Real> sums_of(const State<Real>& state, int divergence) {
  const Real ratio = ::log(state.teacher_z / state.student_z);
  const Real forward = state.forward / state.teacher_z - ratio;
  const Real reverse = state.reverse / state.student_z + ratio;
  switch (divergence) {
    case ROWS_FORWARD_KL:
      return {forward, 0};
    case ROWS_REVERSE_KL:
      return {reverse, reverse};
    case ROWS_SYMMETRIC_KL:
      return {forward + reverse, reverse};
    default:
      return {0, 0};  // the second pass adds them up
  }
}

template <class Real>
ROWS_INLINE void finish_row(const State<Real>& state, int divergence, Constants<Real>& constants,
                            Sums<Real>& sums, Real& ce) {
  constants = {state.teacher_max, ::log(state.teacher_z), state.student_max,
               ::log(state.student_z), ::log(state.ce_z)};
  sums = sums_of(state, divergence);
  ce = (state.student_max - state.label) + constants.log_ce_z;
}

// ---- second pass and gradient --------------------------------------------------------------

// What is the same for all columns of a row.
template <class Real>
struct Row {
  Constants<Real> constants;
  Real log_ratio;  // of the normalisers of teacher and student
  Real inv_tau, teacher_weight, student_weight;
  Real mean;
  Real kd_factor;
  Real ce_factor;     // of softmax(zs), z-loss included
  Real label_factor;  // of onehot(label)
};

template <class Real>
ROWS_INLINE Row<Real> row_of(const RowsObjective& objective, const Constants<Real>& constants,
                             Real mean, Real weight) {
  const Real lse = constants.student_max + constants.log_ce_z;
  const Real factor = static_cast<Real>(objective.scale) * weight;
  const Real ce = static_cast<Real>(objective.ce_factor);
  return {constants,
          constants.log_teacher_z - constants.log_student_z,
          static_cast<Real>(1 / objective.temperature),
          static_cast<Real>(objective.teacher_weight),
          static_cast<Real>(1 - objective.teacher_weight),
          mean,
          static_cast<Real>(objective.kd_factor / objective.temperature) * factor,
          (ce + 2 * static_cast<Real>(objective.z_factor) * lse) * factor,
          ce * factor};
}

// Probabilities and ratios at one column; m = teacher_weight p + student_weight q.
template <class Real>
struct Mixture {
  Real p, q;
  Real log_p_to_m, log_q_to_m;
  Real excess;  // (q - p) / m
};

// The larger of p and q is found first and the smaller from their ratio e^-d: nothing overflows,
// and where p = q both logarithms and the excess are exactly 0.
template <class Real>
ROWS_INLINE Mixture<Real> mixture(Real log_p, Real log_q, Real log_ratio, const Row<Real>& row) {
  const bool p_larger = log_ratio > Real(0);
  const Real over = log_ratio < Real(0) ? Real(0) : log_ratio;  // NaN stays NaN
  const Real under = p_larger ? Real(0) : log_ratio;
  const Exponential<Real> decrease = exponential(under - over);
  const Real larger = exponent(log_p > log_q ? log_p : log_q);
  const Real smaller = weighted(larger, decrease.exp);  // 0 also where both logits are -inf
  const Real change = choose(p_larger, row.student_weight, row.teacher_weight) * decrease.expm1;
  const Real log_larger = -log1p_of(change);
  return {p_larger ? larger : smaller,
          p_larger ? smaller : larger,
          log_larger + under,
          log_larger - over,
          (p_larger ? decrease.expm1 : -decrease.expm1) / (Real(1) + change)};
}

// A column's part of the value, and the slope g: tau dvalue/dzs is q (g - sum q g).
template <class Real>
struct DivergenceTerm {
  Real q, value, slope;
};

template <int divergence, class Real>
ROWS_INLINE DivergenceTerm<Real> mixture_term(const Mixture<Real>& m, const Row<Real>& row) {
  switch (divergence) {
    case ROWS_JSD:
      return {m.q,
              row.teacher_weight * weighted(m.p, m.log_p_to_m) +
                  row.student_weight * weighted(m.q, m.log_q_to_m),
              row.student_weight * m.log_q_to_m};
    case ROWS_SKEW_FORWARD_KL:
      return {m.q, weighted(m.p, m.log_p_to_m), row.student_weight * row.student_weight * m.excess};
    case ROWS_SKEW_REVERSE_KL:
      return {m.q, weighted(m.q, m.log_q_to_m),
              m.log_q_to_m - row.student_weight * row.teacher_weight * m.excess};
    default:  // total variation
      return {m.q, Real(0.5) * (m.q > m.p ? m.q - m.p : m.p - m.q),
              (m.excess > Real(0) ? Real(0.5) : Real(0)) - (m.excess < Real(0) ? Real(0.5) : Real(0))};
  }
}

template <class Real>
struct GradientTerm {
  Real kd;  // dvalue/dzs times the temperature
  Real q;
};

template <int divergence, class Real>
ROWS_INLINE DivergenceTerm<Real> divergence_term(Real teacher, Real student,
                                                 const Row<Real>& row) {
  const Real x = teacher - row.constants.teacher_max, y = student - row.constants.student_max;
  return mixture_term<divergence>(
      mixture(x * row.inv_tau - row.constants.log_teacher_z,
              y * row.inv_tau - row.constants.log_student_z,
              (x - y) * row.inv_tau - row.log_ratio, row),
      row);
}

template <int divergence, class Real>
ROWS_INLINE GradientTerm<Real> gradient_term(Real teacher, Real student, const Row<Real>& row) {
  if (divergence > ROWS_SYMMETRIC_KL) {
    const DivergenceTerm<Real> term = divergence_term<divergence>(teacher, student, row);
    return {weighted(term.q, term.slope - row.mean), term.q};
  }
  const Real x = teacher - row.constants.teacher_max, y = student - row.constants.student_max;
  const Real q = exponent(y * row.inv_tau - row.constants.log_student_z);
  const Real forward = q - exponent(x * row.inv_tau - row.constants.log_teacher_z);
  const Real reverse = weighted(q, ((y - x) * row.inv_tau + row.log_ratio) - row.mean);
  if (divergence == ROWS_FORWARD_KL) return {forward, q};
  if (divergence == ROWS_REVERSE_KL) return {reverse, q};
  return {forward + reverse, q};
}

// softmax(zs) at a column, for temperature 1.
template <class Real>
ROWS_INLINE Real ce_softmax(Real student, const Row<Real>& row) {
  return exponent((student - row.constants.student_max) - row.constants.log_ce_z);
}

}  // namespace rows

// The divergences whose statistics say all, and those that need `rows_sums`.
#define ROWS_FIRST_PASS(apply) \
  apply(ROWS_FORWARD_KL) apply(ROWS_REVERSE_KL) apply(ROWS_SYMMETRIC_KL)
#define ROWS_SECOND_PASS(apply)                                                             \
  apply(ROWS_JSD) apply(ROWS_SKEW_FORWARD_KL) apply(ROWS_SKEW_REVERSE_KL)                  \
      apply(ROWS_TOTAL_VARIATION)
