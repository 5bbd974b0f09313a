//! Inputs and checks on the GPU, by the rule of [`crate::elements`]: kernels for sums of f32, and for everything else
//! the processor's code on a copy. [`Elements::prove`] shows that both are the same rule.

use std::ffi::c_void;

use r2cc::{DType, ReduceOp};

use super::{Buffer, Device, GpuError};
use crate::elements::{self, ElementCheck, KernelRule};

/// Elements of the proof: some blocks, and one that is not full.
const PROOF_ELEMENTS: usize = 5 * 1024 + 77;
/// Where the proof damages an element.
const PROOF_DAMAGE: usize = 4321;

/// Makes and checks elements of one type and operator.
#[derive(Debug)]
pub struct Elements {
    dtype: DType,
    op: ReduceOp,
    world: usize,
    seeds: Buffer,
    found: Buffer,
    /// Memory of the processor, where there is no kernel.
    copy: Vec<u64>,
}

impl Elements {
    /// For results over `world` ranks.
    ///
    /// # Errors
    /// If there is no room on the GPU.
    pub fn new(device: &Device, dtype: DType, op: ReduceOp, world: usize) -> Result<Self, GpuError> {
        let (seeds, found) = (device.buffer(8 * world)?, device.buffer(24)?);
        Ok(Self { dtype, op, world, seeds, found, copy: Vec::new() })
    }

    fn rule(&self, iteration: u64) -> Result<Option<KernelRule>, GpuError> {
        Ok(elements::kernel_rule(self.dtype, self.op, self.world, iteration)?)
    }

    /// Fills a buffer with the input of a rank.
    ///
    /// # Errors
    /// If the GPU fails, or there are no such inputs.
    pub fn fill(&mut self, device: &Device, buffer: Buffer, rank: usize, iteration: u64) -> Result<(), GpuError> {
        let Some(rule) = self.rule(iteration)? else {
            let bytes = room(&mut self.copy, buffer.bytes());
            elements::fill(bytes, self.dtype, self.op, rank, self.world, iteration)?;
            return device.write(buffer, 0, bytes);
        };
        let (mut at, mut count) = (buffer.at, (buffer.bytes() / 4) as u64);
        let (mut seed, mut shift) = (rule.seeds[rank], rule.shift);
        let mut arguments = [pointer(&mut at), pointer(&mut count), pointer(&mut seed), pointer(&mut shift)];
        // SAFETY: (address, elements, u64, u32), as the kernel declares; the address has room for the elements.
        unsafe { device.launch(device.fill, &mut arguments) }?;
        device.finish()
    }

    /// Checks every element of a result.
    ///
    /// # Errors
    /// If the GPU fails.
    pub fn check(&mut self, device: &Device, buffer: Buffer, iteration: u64) -> Result<ElementCheck, GpuError> {
        let Some(rule) = self.rule(iteration)? else {
            let bytes = room(&mut self.copy, buffer.bytes());
            device.read(buffer, 0, bytes)?;
            return Ok(elements::check(bytes, self.dtype, self.op, self.world, iteration, 1)?);
        };
        device.write(self.seeds, 0, bytemuck::cast_slice(&rule.seeds))?;
        device.write(self.found, 0, bytemuck::cast_slice(&[0, 0, u64::MAX]))?;
        let (mut at, mut count) = (buffer.at, (buffer.bytes() / 4) as u64);
        let (mut seeds, mut world, mut shift, mut into) = (self.seeds.at, self.world as u32, rule.shift, self.found.at);
        let mut arguments = [
            pointer(&mut at),
            pointer(&mut count),
            pointer(&mut seeds),
            pointer(&mut world),
            pointer(&mut shift),
            pointer(&mut into),
        ];
        // SAFETY: (address, elements, address of `world` seeds, u32, u32, address of three u64), as declared.
        unsafe { device.launch(device.check, &mut arguments) }?;
        device.finish()?;
        let mut found = [0u64; 3];
        device.read(self.found, 0, bytemuck::cast_slice_mut(&mut found))?;
        let [checked, wrong, least] = found;
        let mut reported = Vec::new();
        if wrong > 0 {
            let (mut bits, index) = ([0u32; 1], least as usize);
            device.read(buffer, 4 * index, bytemuck::cast_slice_mut(&mut bits))?;
            reported.push(elements::wrong_at(self.dtype, self.op, self.world, iteration, index, bits[0])?);
        }
        Ok(ElementCheck { checked, wrong, reported })
    }

    /// Shows on a small buffer that what the kernels fill is, to the bit, what the processor's code fills, that the
    /// kernels find the processor's sums right, and that one damaged element is found, and where.
    ///
    /// # Errors
    /// [`GpuError::KernelsDiffer`] if not.
    pub fn prove(&mut self, device: &Device) -> Result<(), GpuError> {
        const ITERATION: u64 = 0x0123_4567_89ab_cdef;
        if self.rule(ITERATION)?.is_none() {
            return Ok(());
        }
        let differ = |expected: String, found: String| Err(GpuError::KernelsDiffer { expected, found });
        let buffer = device.buffer(4 * PROOF_ELEMENTS)?;
        let mut sums = vec![0f32; PROOF_ELEMENTS];
        for rank in 0..self.world {
            let (mut ours, mut theirs) = (vec![0f32; PROOF_ELEMENTS], vec![0f32; PROOF_ELEMENTS]);
            let as_bytes = bytemuck::cast_slice_mut(&mut ours);
            elements::fill(as_bytes, self.dtype, self.op, rank, self.world, ITERATION)?;
            self.fill(device, buffer, rank, ITERATION)?;
            device.read(buffer, 0, bytemuck::cast_slice_mut(&mut theirs))?;
            if let Some(at) = (0..PROOF_ELEMENTS).find(|at| ours[*at].to_bits() != theirs[*at].to_bits()) {
                return differ(format!("{} at {at} of rank {rank}", ours[at]), theirs[at].to_string());
            }
            sums.iter_mut().zip(&ours).for_each(|(sum, one)| *sum += one);
        }
        device.write(buffer, 0, bytemuck::cast_slice(&sums))?;
        let sound = self.check(device, buffer, ITERATION)?;
        if (sound.checked, sound.wrong) != (PROOF_ELEMENTS as u64, 0) {
            return differ(format!("{PROOF_ELEMENTS} elements right"), format!("{sound:?}"));
        }
        self.damage(device, buffer, PROOF_DAMAGE, 0, false)?;
        let damaged = self.check(device, buffer, ITERATION)?;
        match damaged.first_wrong() {
            Some(wrong) if damaged.wrong == 1 && wrong.index == PROOF_DAMAGE => Ok(()),
            _ => differ(format!("one wrong element, {PROOF_DAMAGE}"), format!("{damaged:?}")),
        }
    }

    /// Damages the element at `index`: a bit that `seed` chooses, or all of them for a NaN.
    ///
    /// # Errors
    /// If the GPU fails.
    pub fn damage(&self, device: &Device, buffer: Buffer, index: usize, seed: u64, nan: bool) -> Result<(), GpuError> {
        let size = self.dtype.size_bytes();
        let mut element = [0u8; 8];
        device.read(buffer, index * size, &mut element[..size])?;
        if nan {
            // All bits set is a NaN in every float format.
            element.fill(0xff);
        } else {
            let bit = (seed % (8 * size as u64)) as usize;
            element[bit / 8] ^= 1 << (bit % 8);
        }
        device.write(buffer, index * size, &element[..size])
    }
}

fn room(copy: &mut Vec<u64>, bytes: usize) -> &mut [u8] {
    copy.resize(bytes.div_ceil(8), 0);
    &mut bytemuck::cast_slice_mut(copy)[..bytes]
}

fn pointer<T>(value: &mut T) -> *mut c_void {
    (&raw mut *value).cast()
}
