// What the row kernels' libraries offer: a plain C interface, the same for CPU and CUDA.
//
// R rows, S columns. "Real" is double for a tile of float64 student logits, else float; state,
// constants, sums, ce, weights and partials are arrays of it, without gaps. What they hold is said
// in toolkit/losses/rows.py. Every function returns 0, or a code that rows_error explains.
#pragma once
#include <stdint.h>

enum RowsType { ROWS_FLOAT32 = 0, ROWS_BFLOAT16 = 1, ROWS_FLOAT64 = 2 };

enum RowsDivergence {
  ROWS_FORWARD_KL = 0,
  ROWS_REVERSE_KL = 1,
  ROWS_SYMMETRIC_KL = 2,
  ROWS_JSD = 3,
  ROWS_SKEW_FORWARD_KL = 4,
  ROWS_SKEW_REVERSE_KL = 5,
  ROWS_TOTAL_VARIATION = 6
};

// Logits of some rows in one shard of the vocabulary; strides count elements.
struct RowsTile {
  void* student;  // rows_gradient overwrites it
  const void* teacher;
  int64_t rows, columns, student_stride, teacher_stride, first_column;
  int32_t student_type, teacher_type;
};

struct RowsObjective {
  double temperature;
  double teacher_weight;  // of p in the mixture m; q has the rest
  double kd_factor, ce_factor, z_factor, scale;
  double softcap;  // 0: none
  int32_t divergence;
};

struct RowsLaunch {
  void* stream;         // CUDA only
  int32_t device;       // CUDA only
  int32_t num_threads;  // CPU only; has no effect on the results
};

#ifdef __cplusplus
extern "C" {
#endif

// Columns that share a partial state: partials have room for ceil(S / this) of them per row.
int64_t rows_chunk_columns(void);

// Merges a tile into state [R, 8]; partials [R, chunks, 8] is scratch memory.
int rows_statistics(const RowsTile* tile, const RowsObjective* objective, const RowsLaunch* launch,
                    const int64_t* labels, void* partials, void* state);

// Writes constants [R, 5], sums [R, 2] and ce [R]; `type` is the type of all of them.
int rows_finish(const RowsObjective* objective, const RowsLaunch* launch, int64_t rows,
                int32_t type, const void* state, void* constants, void* sums, void* ce);

// Adds a tile's part to sums [R, 2]; partials [R, chunks, 2] is scratch memory.
int rows_sums(const RowsTile* tile, const RowsObjective* objective, const RowsLaunch* launch,
              const void* constants, void* partials, void* sums);

// Writes the gradient over the student's logits; weights [R] may be null.
int rows_gradient(const RowsTile* tile, const RowsObjective* objective, const RowsLaunch* launch,
                  const int64_t* labels, const void* weights, const void* constants,
                  const void* sums);

const char* rows_error(int code);

#ifdef __cplusplus
}
#endif
