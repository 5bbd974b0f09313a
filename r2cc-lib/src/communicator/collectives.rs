//! The collectives of a [`Communicator`]: typed methods, and [`Communicator::perform`] for whoever chooses operation
//! and element type at run time. Owns the check of arguments.
//!
//! With P ranks and blocks of n elements, block b of a buffer of P n elements is elements b n to (b + 1) n. In place,
//! as in NCCL, the smaller of a rank's two buffers is its own block of the larger one.

use std::sync::Arc;

use crate::collective::{Buffers, Collective, Prepared, r2cc_collective_begin};
use crate::dtype::{DType, Element, ReduceOp};
use crate::engine::Command;
use crate::schedule::layout::Layout;
use crate::schedule::{Goal, Part, Shape, exchange};

use super::{Communicator, Error};

/// A buffer of at most so many bytes takes the time of its messages' rounds, whatever its length.
pub(super) const SMALL_BYTES: usize = 8 << 10;

/// A collective, for [`Communicator::perform`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// [`Communicator::all_reduce`].
    AllReduce(ReduceOp),
    /// [`Communicator::all_gather`].
    AllGather,
    /// [`Communicator::reduce_scatter`].
    ReduceScatter(ReduceOp),
    /// [`Communicator::broadcast`], also out of place.
    Broadcast {
        /// Rank whose elements are sent.
        root: usize,
    },
    /// [`Communicator::reduce`].
    Reduce {
        /// How elements are combined.
        op: ReduceOp,
        /// Rank that gets the result.
        root: usize,
    },
    /// [`Communicator::all_to_all`]; not in place.
    AllToAll,
    /// [`Communicator::gather`].
    Gather {
        /// Rank that gets the blocks.
        root: usize,
    },
    /// [`Communicator::scatter`].
    Scatter {
        /// Rank that has the blocks.
        root: usize,
    },
    /// A grouped Send to the next rank and Recv from the one before; not in place.
    Shift,
}

impl Operation {
    fn collective(self) -> Collective {
        match self {
            Self::AllReduce(_) => Collective::AllReduce,
            Self::AllGather => Collective::AllGather,
            Self::ReduceScatter(_) => Collective::ReduceScatter,
            Self::Broadcast { .. } => Collective::Broadcast,
            Self::Reduce { .. } => Collective::Reduce,
            Self::AllToAll => Collective::AllToAll,
            Self::Gather { .. } => Collective::Gather,
            Self::Scatter { .. } => Collective::Scatter,
            Self::Shift => Collective::SendRecv,
        }
    }

    fn goal(self, in_place: bool) -> Goal {
        match self {
            Self::AllReduce(_) => Goal::AllReduce { in_place },
            Self::AllGather => Goal::AllGather { in_place },
            Self::ReduceScatter(_) => Goal::ReduceScatter { in_place },
            Self::Broadcast { root } => Goal::Broadcast { root, in_place },
            Self::Reduce { root, .. } => Goal::Reduce { root, in_place },
            Self::AllToAll => Goal::AllToAll,
            Self::Gather { root } => Goal::Gather { root, in_place },
            Self::Scatter { root } => Goal::Scatter { root, in_place },
            Self::Shift => Goal::Shift,
        }
    }

    fn reduce_op(self) -> ReduceOp {
        match self {
            Self::AllReduce(op) | Self::ReduceScatter(op) | Self::Reduce { op, .. } => op,
            // Nothing is reduced.
            _ => ReduceOp::Sum,
        }
    }
}

/// Where a rank's buffers are: two of them, or both in one.
enum Memory<'a> {
    Two(&'a [u8], &'a mut [u8]),
    One(&'a mut [u8]),
}

impl Communicator {
    /// `output[i] = op over all ranks of input[i]`; both have the same length on every rank.
    ///
    /// # Errors
    /// If the lengths differ, or the communicator has failed.
    pub fn all_reduce<T: Element>(&mut self, input: &[T], output: &mut [T], op: ReduceOp) -> Result<(), Error> {
        self.typed(Operation::AllReduce(op), input, output)
    }

    /// `buffer[i] = op over all ranks of buffer[i]`, in place.
    ///
    /// # Errors
    /// If the communicator has failed; `buffer` then holds partial results.
    pub fn all_reduce_in_place<T: Element>(&mut self, buffer: &mut [T], op: ReduceOp) -> Result<(), Error> {
        self.typed_in_place(Operation::AllReduce(op), buffer)
    }

    /// As [`Communicator::all_reduce`] for elements of a type chosen at run time; in place without an `input`.
    ///
    /// # Errors
    /// If lengths or alignment do not fit `dtype`, or the communicator has failed.
    pub fn all_reduce_bytes(
        &mut self,
        dtype: DType,
        op: ReduceOp,
        input: Option<&[u8]>,
        output: &mut [u8],
    ) -> Result<(), Error> {
        self.perform(Operation::AllReduce(op), dtype, input, output)
    }

    /// Every rank's `buffer` becomes the root's.
    ///
    /// # Errors
    /// If `root` is no rank, or the communicator has failed.
    pub fn broadcast<T: Element>(&mut self, buffer: &mut [T], root: usize) -> Result<(), Error> {
        self.typed_in_place(Operation::Broadcast { root }, buffer)
    }

    /// On the root, `output[i] = op over all ranks of input[i]`. The others' `output` is not looked at; it may be empty.
    ///
    /// # Errors
    /// If `root` is no rank, the root's lengths differ, or the communicator has failed.
    pub fn reduce<T: Element>(
        &mut self,
        input: &[T],
        output: &mut [T],
        op: ReduceOp,
        root: usize,
    ) -> Result<(), Error> {
        self.typed(Operation::Reduce { op, root }, input, output)
    }

    /// On the root, `buffer[i] = op over all ranks of buffer[i]`; the others' `buffer` stays as it is.
    ///
    /// # Errors
    /// If `root` is no rank, or the communicator has failed.
    pub fn reduce_in_place<T: Element>(&mut self, buffer: &mut [T], op: ReduceOp, root: usize) -> Result<(), Error> {
        self.typed_in_place(Operation::Reduce { op, root }, buffer)
    }

    /// Block b of every rank's `output` (P blocks) becomes rank b's `input` (one block).
    ///
    /// # Errors
    /// If `output` is not as long as the inputs of all ranks, or the communicator has failed.
    pub fn all_gather<T: Element>(&mut self, input: &[T], output: &mut [T]) -> Result<(), Error> {
        self.typed(Operation::AllGather, input, output)
    }

    /// Block b of every rank's `buffer` (P blocks) becomes rank b's own block.
    ///
    /// # Errors
    /// If the length is no multiple of the number of ranks, or the communicator has failed.
    pub fn all_gather_in_place<T: Element>(&mut self, buffer: &mut [T]) -> Result<(), Error> {
        self.typed_in_place(Operation::AllGather, buffer)
    }

    /// Rank r's `output` (one block) becomes the reduction of block r of every rank's `input` (P blocks).
    ///
    /// # Errors
    /// If `input` is not as long as the outputs of all ranks, or the communicator has failed.
    pub fn reduce_scatter<T: Element>(&mut self, input: &[T], output: &mut [T], op: ReduceOp) -> Result<(), Error> {
        self.typed(Operation::ReduceScatter(op), input, output)
    }

    /// The rank's own block of `buffer` (P blocks) becomes the reduction of that block of every rank's; the other
    /// blocks stay as they are.
    ///
    /// # Errors
    /// If the length is no multiple of the number of ranks, or the communicator has failed.
    pub fn reduce_scatter_in_place<T: Element>(&mut self, buffer: &mut [T], op: ReduceOp) -> Result<(), Error> {
        self.typed_in_place(Operation::ReduceScatter(op), buffer)
    }

    /// Block b of rank r's `output` becomes block r of rank b's `input`; both have P blocks.
    ///
    /// # Errors
    /// If the lengths differ or are no multiple of the number of ranks, or the communicator has failed.
    pub fn all_to_all<T: Element>(&mut self, input: &[T], output: &mut [T]) -> Result<(), Error> {
        self.typed(Operation::AllToAll, input, output)
    }

    /// Block b of the root's `output` (P blocks) becomes rank b's `input` (one block). The others' `output` is not
    /// looked at; it may be empty.
    ///
    /// # Errors
    /// If `root` is no rank, its `output` is not as long as all inputs, or the communicator has failed.
    pub fn gather<T: Element>(&mut self, input: &[T], output: &mut [T], root: usize) -> Result<(), Error> {
        self.typed(Operation::Gather { root }, input, output)
    }

    /// Rank r's `output` (one block) becomes block r of the root's `input` (P blocks). The others' `input` is not
    /// looked at; it may be empty.
    ///
    /// # Errors
    /// If `root` is no rank, its `input` is not as long as all outputs, or the communicator has failed.
    pub fn scatter<T: Element>(&mut self, input: &[T], output: &mut [T], root: usize) -> Result<(), Error> {
        self.typed(Operation::Scatter { root }, input, output)
    }

    /// Sends `elements` to rank `to`, which calls [`Communicator::recv`], or receives in an exchange.
    ///
    /// # Errors
    /// If `to` is no other rank, or the communicator has failed.
    pub fn send<T: Element>(&mut self, elements: &[T], to: usize) -> Result<(), Error> {
        self.other_rank(to)?;
        self.exchange(elements, &mut [], &[Part { peer: to, elements: 0..elements.len() }], &[])
    }

    /// Receives `elements` from rank `from`, which calls [`Communicator::send`] with as many.
    ///
    /// # Errors
    /// If `from` is no other rank, or the communicator has failed.
    pub fn recv<T: Element>(&mut self, elements: &mut [T], from: usize) -> Result<(), Error> {
        self.other_rank(from)?;
        let receives = [Part { peer: from, elements: 0..elements.len() }];
        self.exchange(&[], elements, &[], &receives)
    }

    /// A group of Sends of parts of `input` and Recvs into parts of `output`, all at once: returns when all are done.
    /// The k-th send from a to b matches the k-th receive of b from a, of as many elements; a rank's sends to itself
    /// are copied.
    ///
    /// # Errors
    /// If a part names no rank or lies outside its buffer, parts of `output` overlap, what a rank sends to itself does
    /// not match, or the communicator has failed.
    pub fn exchange<T: Element>(
        &mut self,
        input: &[T],
        output: &mut [T],
        sends: &[Part],
        receives: &[Part],
    ) -> Result<(), Error> {
        let bytes_moved = size_of_val(input).max(size_of_val(output)) as u64;
        r2cc_collective_begin(Collective::SendRecv as u64, bytes_moved);
        self.fits("input", sends, input.len())?;
        self.fits("output", receives, output.len())?;
        let mut landing: Vec<_> = receives.iter().map(|p| p.elements.clone()).filter(|r| !r.is_empty()).collect();
        landing.sort_by_key(|r| r.start);
        if let Some(pair) = landing.windows(2).find(|pair| pair[1].start < pair[0].end) {
            return Err(Error::Argument {
                what: format!("elements {:?} and {:?} of the output overlap", pair[0], pair[1]),
                hint: "each element is received once",
            });
        }
        let own = |parts: &[Part]| -> Vec<usize> {
            parts.iter().filter(|p| p.peer == self.rank).map(|p| p.elements.len()).collect()
        };
        if own(sends) != own(receives) {
            return Err(Error::Argument {
                what: format!("sends {:?} elements to itself and receives {:?}", own(sends), own(receives)),
                hint: "the k-th send of a rank to itself is as long as its k-th receive from itself",
            });
        }
        let plan = exchange(self.rank, sends, receives);
        self.run(plan.into(), bytes(input), bytes_mut(output), T::DTYPE, ReduceOp::Sum)
    }

    /// Any collective on elements of a type chosen at run time; in place without an `input`, `output` then being the
    /// rank's larger buffer.
    ///
    /// # Errors
    /// If the root is no rank, lengths or alignment do not fit, the operation is not defined in place, or the
    /// communicator has failed.
    pub fn perform(
        &mut self,
        operation: Operation,
        dtype: DType,
        input: Option<&[u8]>,
        output: &mut [u8],
    ) -> Result<(), Error> {
        let longer = input.map_or(0, <[u8]>::len).max(output.len());
        r2cc_collective_begin(operation.collective() as u64, longer as u64);
        let memory = match input {
            Some(input) => Memory::Two(input, output),
            None if matches!(operation, Operation::AllToAll | Operation::Shift) => {
                return Err(Error::Argument {
                    what: format!("{operation:?} in place"),
                    hint: "it needs an input and an output",
                });
            }
            None => Memory::One(output),
        };
        let in_place = matches!(memory, Memory::One(_));
        let goal = operation.goal(in_place);
        if let Some(root) = goal.root().filter(|root| *root >= self.world) {
            return Err(self.no_rank("root", root));
        }
        let elements = self.block(goal, dtype, &memory)?;
        let layout = Layout::new(goal, self.rank, self.world, elements);
        let shape = Shape { elements, element_bytes: dtype.size_bytes(), in_place, slice_elements: None };
        let plan = self.plan_of(operation, shape);
        let op = operation.reduce_op();
        let small = longer <= SMALL_BYTES;
        match memory {
            Memory::Two(input, output) => self.run_at(plan, input.as_ptr(), output.as_mut_ptr(), dtype, op, small),
            Memory::One(buffer) => {
                let base = buffer.as_mut_ptr();
                let start = |range: &std::ops::Range<usize>| range.start * dtype.size_bytes();
                // SAFETY: `block` has compared the layout with the buffer's length.
                let (input, output) = unsafe { (base.add(start(&layout.input)), base.add(start(&layout.output))) };
                self.run_at(plan, input, output, dtype, op, small)
            }
        }
    }

    /// Elements of a block, from the lengths of this rank's buffers.
    fn block(&self, goal: Goal, dtype: DType, memory: &Memory<'_>) -> Result<usize, Error> {
        // What one element a block needs says how many blocks each buffer has.
        let unit = Layout::new(goal, self.rank, self.world, 1);
        let (blocks_in, blocks_out) = (unit.input.len(), unit.output.len());
        let of_length = |what: &str, buffer: &[u8], blocks: usize| -> Result<usize, Error> {
            let elements = self.element_count(dtype, buffer)?;
            if !elements.is_multiple_of(blocks) {
                return Err(Error::Argument {
                    what: format!("{elements} elements of {what} for {blocks} ranks"),
                    hint: "it holds one block of equal length for each rank",
                });
            }
            Ok(elements / blocks)
        };
        match memory {
            Memory::One(buffer) => of_length("buffer", buffer, blocks_in.max(blocks_out)),
            Memory::Two(input, output) => {
                // A buffer of no blocks is not looked at.
                let input = (blocks_in > 0).then(|| of_length("input", input, blocks_in)).transpose()?;
                let output = (blocks_out > 0).then(|| of_length("output", output, blocks_out)).transpose()?;
                match (input, output) {
                    (Some(i), Some(o)) if i != o => Err(Error::Argument {
                        what: format!("input of {} elements, output of {}", i * blocks_in, o * blocks_out),
                        hint: "with P ranks, a buffer of all blocks is P times as long as one of a single block",
                    }),
                    (input, output) => Ok(input.or(output).unwrap_or(0)),
                }
            }
        }
    }

    fn typed<T: Element>(&mut self, operation: Operation, input: &[T], output: &mut [T]) -> Result<(), Error> {
        self.perform(operation, T::DTYPE, Some(bytes(input)), bytes_mut(output))
    }

    fn typed_in_place<T: Element>(&mut self, operation: Operation, buffer: &mut [T]) -> Result<(), Error> {
        self.perform(operation, T::DTYPE, None, bytes_mut(buffer))
    }

    fn no_rank(&self, what: &str, rank: usize) -> Error {
        Error::Argument {
            what: format!("{what} {rank} in a world of {}", self.world),
            hint: "ranks count from 0 to world - 1",
        }
    }

    fn other_rank(&self, rank: usize) -> Result<(), Error> {
        if rank == self.rank {
            return Err(Error::Argument {
                what: format!("rank {rank} and itself"),
                hint: "`exchange` copies what a rank sends to itself",
            });
        }
        if rank < self.world { Ok(()) } else { Err(self.no_rank("rank", rank)) }
    }

    fn fits(&self, buffer: &str, parts: &[Part], len: usize) -> Result<(), Error> {
        for Part { peer, elements } in parts {
            if *peer >= self.world {
                return Err(self.no_rank("rank", *peer));
            }
            if elements.start > elements.end || elements.end > len {
                return Err(Error::Argument {
                    what: format!("elements {elements:?} of an {buffer} of {len}"),
                    hint: "a part lies inside its buffer",
                });
            }
        }
        Ok(())
    }

    fn element_count(&self, dtype: DType, buffer: &[u8]) -> Result<usize, Error> {
        let size = dtype.size_bytes();
        // An empty buffer has no place in memory that could be wrong.
        let aligned = buffer.is_empty() || (buffer.as_ptr() as usize).is_multiple_of(size);
        if !buffer.len().is_multiple_of(size) || !aligned {
            return Err(Error::Argument {
                what: format!(
                    "a buffer of {} bytes at {:p} for elements of {size} bytes",
                    buffer.len(),
                    buffer.as_ptr()
                ),
                hint: "length and address must be multiples of the element size",
            });
        }
        Ok(buffer.len() / size)
    }

    /// Runs a plan over two buffers that do not overlap.
    pub(super) fn run(
        &mut self,
        plan: Prepared,
        input: &[u8],
        output: &mut [u8],
        dtype: DType,
        op: ReduceOp,
    ) -> Result<(), Error> {
        let small = input.len().max(output.len()) <= SMALL_BYTES;
        self.run_at(Arc::new(plan), input.as_ptr(), output.as_mut_ptr(), dtype, op, small)
    }

    /// Runs a plan made for what lies at `input` and `output`, which the caller keeps borrowed until this returns.
    /// What is `small` is worth polling for.
    fn run_at(
        &mut self,
        plan: Arc<Prepared>,
        input: *const u8,
        output: *mut u8,
        dtype: DType,
        op: ReduceOp,
        small: bool,
    ) -> Result<(), Error> {
        let words = (plan.plan.scratch_elements * dtype.size_bytes()).div_ceil(size_of::<u64>());
        if self.scratch.len() < words {
            self.scratch.resize(words, 0);
        }
        let buffers = Buffers { input, output, scratch: self.scratch.as_mut_ptr().cast() };
        // Blocks until the engine has dropped the plan, so the borrows outlive every use of the pointers.
        let command = |answer| Command::Run { plan, buffers, dtype, op, answer };
        if small { self.driving.call(command) } else { self.ask(command)? }
    }
}

fn bytes<T: Element>(elements: &[T]) -> &[u8] {
    // SAFETY: an `Element` has no padding and any alignment suits a byte.
    unsafe { std::slice::from_raw_parts(elements.as_ptr().cast(), size_of_val(elements)) }
}

fn bytes_mut<T: Element>(elements: &mut [T]) -> &mut [u8] {
    // SAFETY: as in `bytes`; every byte pattern is a valid element.
    unsafe { std::slice::from_raw_parts_mut(elements.as_mut_ptr().cast(), size_of_val(elements)) }
}
