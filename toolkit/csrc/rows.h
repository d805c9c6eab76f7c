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

// log(1 + e^x) and log(1 + e^-x).
template <class Real>
struct Softplus {
  Real of_x, of_minus_x;
};

template <class Real>
ROWS_INLINE Softplus<Real> softplus(Real x, Real exp_minus_abs_x) {
  const Real rest = log1p_of(exp_minus_abs_x), positive = x < Real(0) ? Real(0) : x;
  return {positive + rest, (positive - x) + rest};
}

// What is the same for all columns of a row; m = teacher_weight p + student_weight q.
template <class Real>
struct Row {
  Constants<Real> constants;
  Real log_ratio;  // of the normalisers of teacher and student
  Real inv_tau, student_weight, log_teacher_weight, log_student_weight;
  Real odds;             // log(teacher_weight / student_weight)
  Softplus<Real> equal;  // of the odds: where p = q
  Real mean;
  Real kd_factor;
  Real ce_factor;     // of softmax(zs), z-loss included
  Real label_factor;  // of onehot(label)
};

// It must be compiled into the function with the loop over the columns: that equal models give
// exactly 0 takes the same fused products and sums in both.
template <class Real>
ROWS_INLINE Row<Real> row_of(const RowsObjective& objective, const Constants<Real>& constants,
                             Real mean, Real weight) {
  const Real lse = constants.student_max + constants.log_ce_z;
  const Real factor = static_cast<Real>(objective.scale) * weight;
  const Real ce = static_cast<Real>(objective.ce_factor);
  const Real log_teacher_weight = static_cast<Real>(::log(objective.teacher_weight));
  const Real log_student_weight = static_cast<Real>(::log(1 - objective.teacher_weight));
  const Real odds = log_teacher_weight - log_student_weight;
  return {constants,
          constants.log_teacher_z - constants.log_student_z,
          static_cast<Real>(1 / objective.temperature),
          static_cast<Real>(1 - objective.teacher_weight),
          log_teacher_weight,
          log_student_weight,
          odds,
          softplus(odds, exponent(-::fabs(odds))),
          mean,
          static_cast<Real>(objective.kd_factor / objective.temperature) * factor,
          (ce + 2 * static_cast<Real>(objective.z_factor) * lse) * factor,
          ce * factor};
}

// Logarithms of probabilities at a column, and of p / q, which is exactly 0 for equal rows.
template <class Real>
struct Logs {
  Real p, q, p_to_q;
};

// Logits of -inf become finite here: 0 times the logarithm is 0 then.
template <class Real>
ROWS_INLINE Real at_least_lowest(Real x) {
  const Real lowest = static_cast<Real>(LOWEST);
  return lowest > x ? lowest : x;
}

template <class Real>
ROWS_INLINE Logs<Real> logs_of(Real teacher, Real student, const Row<Real>& row) {
  const Real x = at_least_lowest(teacher - row.constants.teacher_max);
  const Real y = at_least_lowest(student - row.constants.student_max);
  return {x * row.inv_tau - row.constants.log_teacher_z,
          y * row.inv_tau - row.constants.log_student_z, (x - y) * row.inv_tau - row.log_ratio};
}

// A column in the mixture. With x = log(p_share / q_share), which is the odds where p = q,
// log(q / m) = log(1 + e^odds) - log(1 + e^x).
template <class Real>
struct Mixture {
  Real p_share, q_share;  // teacher_weight p, student_weight q
  Real log_p_to_m, log_q_to_m;
};

// The larger share is found first and the smaller from their ratio: nothing overflows.
template <class Real>
ROWS_INLINE Mixture<Real> mixture(const Logs<Real>& logs, const Row<Real>& row) {
  const Real x = logs.p_to_q + row.odds;
  const Real log_p = logs.p + row.log_teacher_weight, log_q = logs.q + row.log_student_weight;
  const Real ratio = exponent(-::fabs(x));
  const Real larger = exponent(log_p > log_q ? log_p : log_q), smaller = larger * ratio;
  const Softplus<Real> change = softplus(x, ratio);
  return {x > Real(0) ? larger : smaller, x > Real(0) ? smaller : larger,
          row.equal.of_minus_x - change.of_minus_x, row.equal.of_x - change.of_x};
}

// Where the slope of tau dvalue/dzs = q (slope - mean) is known only after the first pass.
template <int divergence, class Real>
ROWS_INLINE Real slope(const Logs<Real>& logs, const Mixture<Real>& m, const Row<Real>& row) {
  switch (divergence) {
    case ROWS_JSD:
      return row.student_weight * m.log_q_to_m;
    case ROWS_SKEW_FORWARD_KL:
      return -row.student_weight * exponential(m.log_p_to_m).expm1;
    case ROWS_SKEW_REVERSE_KL:
      return m.log_q_to_m - row.student_weight * exponential(m.log_q_to_m).expm1;
    default:  // total variation: half the sign of q - p
      return logs.p_to_q < Real(0) ? Real(0.5) : logs.p_to_q > Real(0) ? Real(-0.5) : logs.p_to_q;
  }
}

// A column's part of the value and of the mean slope.
template <int divergence, class Real>
ROWS_INLINE Sums<Real> sums_term(Real teacher, Real student, const Row<Real>& row) {
  const Logs<Real> logs = logs_of(teacher, student, row);
  const Mixture<Real> m = mixture(logs, row);
  if (divergence == ROWS_JSD) {
    const Real q_term = m.q_share * m.log_q_to_m;
    return {m.p_share * m.log_p_to_m + q_term, q_term};
  }
  const Real p = exponent(logs.p), q = exponent(logs.q);
  const Real mean = q * slope<divergence>(logs, m, row);
  if (divergence == ROWS_SKEW_FORWARD_KL) return {p * m.log_p_to_m, mean};
  if (divergence == ROWS_SKEW_REVERSE_KL) return {q * m.log_q_to_m, mean};
  return {Real(0.5) * ::fabs(p - q), mean};
}

template <class Real>
struct GradientTerm {
  Real kd;  // dvalue/dzs times the temperature
  Real q;
};

template <int divergence, class Real>
ROWS_INLINE GradientTerm<Real> gradient_term(Real teacher, Real student, const Row<Real>& row) {
  if (divergence > ROWS_SYMMETRIC_KL) {
    const Logs<Real> logs = logs_of(teacher, student, row);
    const Real q = exponent(logs.q);
    return {q * (slope<divergence>(logs, mixture(logs, row), row) - row.mean), q};
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
