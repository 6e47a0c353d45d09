//! Matrix products on parts of buffers.

use rayon::prelude::*;

/// A matrix of given strides in a buffer.
#[derive(Clone, Copy)]
pub struct Matrix<'a> {
    data: &'a [f32],
    pub rows: usize,
    pub columns: usize,
    row_stride: usize,
    column_stride: usize,
}

impl<'a> Matrix<'a> {
    /// Rows one after another, of which each starts `row_stride` after the one before.
    ///
    /// # Panics
    /// If it does not lie in `data`.
    pub fn new(data: &'a [f32], [rows, columns]: [usize; 2], row_stride: usize) -> Self {
        let fits = rows == 0 || columns == 0 || (rows - 1) * row_stride + columns <= data.len();
        assert!(fits, "a matrix lies in its buffer");
        Matrix {
            data,
            rows,
            columns,
            row_stride,
            column_stride: 1,
        }
    }

    /// `count` of its rows.
    ///
    /// # Panics
    /// If it has fewer.
    fn rows(self, first: usize, count: usize) -> Self {
        assert!(first + count <= self.rows, "a matrix has these rows");
        Matrix {
            data: &self.data[first * self.row_stride..],
            rows: count,
            ..self
        }
    }

    pub fn transposed(self) -> Self {
        Matrix {
            rows: self.columns,
            columns: self.rows,
            row_stride: self.column_stride,
            column_stride: self.row_stride,
            ..self
        }
    }
}

/// Whether a product uses one thread or all of the pool's.
#[derive(Clone, Copy)]
pub enum Threads {
    One,
    All,
}

/// `to = scale · a b`, or with `add` `to += scale · a b`, for `to` of rows that start `row_stride` after one
/// another.
///
/// # Safety
/// The elements of `to` may be written, nobody else reads or writes them meanwhile, and with `add` they have
/// values.
pub unsafe fn multiply(
    to: *mut f32,
    row_stride: usize,
    (a, b): (Matrix<'_>, Matrix<'_>),
    scale: f32,
    add: bool,
    threads: Threads,
) {
    assert_eq!(a.columns, b.rows, "the inner dimension");
    let threads = match threads {
        Threads::One => gemm::Parallelism::None,
        Threads::All => gemm::Parallelism::Rayon(0),
    };
    // SAFETY: both matrices lie in their buffers (checked where they are made), and the caller answers for `to`.
    unsafe {
        gemm::gemm(
            a.rows,
            b.columns,
            a.columns,
            to,
            1,
            row_stride as isize,
            add,
            a.data.as_ptr(),
            a.column_stride as isize,
            a.row_stride as isize,
            b.data.as_ptr(),
            b.column_stride as isize,
            b.row_stride as isize,
            1.0,
            scale,
            false,
            false,
            false,
            threads,
        );
    }
}

/// `to = a b`, or with `add` `to += a b`, by so many rows at a time, of which each thread takes some. A product packs
/// `a` where it is transposed: so for a tall one it packs less at once, and what it packed is still in its cache.
///
/// # Safety
/// As for [`multiply`].
pub unsafe fn multiply_by_rows(
    to: Shared,
    row_stride: usize,
    (a, b): (Matrix<'_>, Matrix<'_>),
    add: bool,
    rows: usize,
) {
    (0..a.rows.div_ceil(rows)).into_par_iter().for_each(|part| {
        let first = part * rows;
        let a = a.rows(first, rows.min(a.rows - first));
        // SAFETY: the caller answers for all of `to`, and each task has rows of its own.
        unsafe {
            let to = to.at(first * row_stride);
            multiply(to, row_stride, (a, b), 1.0, add, Threads::One);
        }
    });
}

/// A buffer that several tasks write to, each at places of its own.
#[derive(Clone, Copy)]
pub struct Shared(*mut f32);

// SAFETY: it is an address; whoever writes through it answers for the places.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

impl Shared {
    pub fn new(values: &mut [super::Unwritten]) -> Self {
        Shared(values.as_mut_ptr().cast())
    }

    /// The address of element `index`.
    ///
    /// # Safety
    /// The buffer has it.
    pub unsafe fn at(self, index: usize) -> *mut f32 {
        // SAFETY: the caller says so.
        unsafe { self.0.add(index) }
    }
}
