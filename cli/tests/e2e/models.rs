//! Safetensors files spelled by hand, with elements whose mean is known exactly.

use std::path::Path;

/// The name, dtype and shape of a tensor.
pub type Tensor<'a> = (&'a str, &'a str, &'a [u64]);

/// The weights of the two clients that [`Layout::client`] gives.
pub const EXAMPLES: [u32; 2] = [1, 3];

/// A header, and where the elements of each dtype lie.
#[derive(Clone)]
pub struct Layout {
    pub header: Vec<u8>,
    runs: Vec<(String, u64)>,
}

impl Layout {
    /// Tensors that lie one after the other, in the header as in the data.
    pub fn new(tensors: &[Tensor<'_>], metadata: Option<&str>) -> Layout {
        let mut begin = 0;
        let mut entries: Vec<String> =
            metadata.iter().map(|fields| format!("\"__metadata__\":{fields}")).collect();
        let mut runs = Vec::new();
        for (name, dtype, shape) in tensors {
            let elements: u64 = shape.iter().product();
            let end = begin + elements * element_bytes(dtype);
            let name = serde_json::to_string(name).unwrap();
            entries.push(format!(
                r#"{name}:{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":[{begin},{end}]}}"#
            ));
            runs.push((dtype.to_string(), elements));
            begin = end;
        }
        Layout::with_header(&format!("{{{}}}", entries.join(",")), runs)
    }

    /// A header as it stands, and the dtypes and numbers of elements in the order of the data.
    pub fn with_header(header: &str, runs: Vec<(String, u64)>) -> Layout {
        Layout { header: header.as_bytes().to_vec(), runs }
    }

    /// A file with the model of client 0 or 1.
    pub fn client(&self, client: usize) -> Vec<u8> {
        self.file([3.0, -1.0][client])
    }

    /// A file with the exact mean of both clients' models.
    pub fn mean(&self) -> Vec<u8> {
        self.file(0.0)
    }

    /// A file with elements that are off the mean by `delta`; a bool votes against it where
    /// `delta` is positive.
    pub fn file(&self, delta: f64) -> Vec<u8> {
        let mut file = (self.header.len() as u64).to_le_bytes().to_vec();
        file.extend(&self.header);
        let mut index = 0;
        for (dtype, elements) in &self.runs {
            for _ in 0..*elements {
                index += 1;
                push_element(&mut file, dtype, 5 + index * 7 % 40, delta);
            }
        }
        file
    }

    pub fn write_client(&self, client: usize, path: &Path) {
        std::fs::write(path, self.client(client)).unwrap();
    }
}

fn element_bytes(dtype: &str) -> u64 {
    match dtype {
        "F64" | "I64" | "U64" => 8,
        "F32" | "I32" | "U32" => 4,
        "F16" | "BF16" | "I16" | "U16" => 2,
        "I8" | "U8" | "BOOL" => 1,
        dtype => panic!("no element of {dtype}"),
    }
}

/// Small whole numbers, and parts of a power of two: exact in every dtype.
fn push_element(file: &mut Vec<u8>, dtype: &str, mean: u32, delta: f64) {
    let number = f64::from(mean) + delta;
    let single = (number as f32).to_bits();
    let whole = number as i64;
    match dtype {
        "F64" => file.extend(number.to_le_bytes()),
        "F32" => file.extend(single.to_le_bytes()),
        "BF16" => file.extend(&single.to_le_bytes()[2..]),
        // The exponent of an f16 is off by 15 and that of an f32 by 127; 13 bits are cut off.
        "F16" => file.extend((((single >> 13) - ((127 - 15) << 10)) as u16).to_le_bytes()),
        "BOOL" => file.push(u8::from((mean % 2 == 1) != (delta > 0.0))),
        dtype => file.extend(&whole.to_le_bytes()[..element_bytes(dtype) as usize]),
    }
}

/// Every dtype that is averaged, with odd sizes, so that almost nothing is aligned.
pub fn every_dtype() -> Layout {
    let tensors: &[Tensor<'_>] = &[
        ("bytes", "U8", &[3]),
        ("single", "F32", &[5, 7]),
        ("flags", "BOOL", &[11]),
        ("double", "F64", &[1, 13]),
        ("short", "I8", &[1]),
        ("brain", "BF16", &[17]),
        ("half", "F16", &[3, 3, 3]),
        ("i16", "I16", &[19]),
        ("i32", "I32", &[23]),
        ("i64", "I64", &[29]),
        ("u16", "U16", &[31]),
        ("u32", "U32", &[37]),
        ("u64", "U64", &[41]),
        ("scalar", "F32", &[]),
        ("nothing", "BF16", &[0, 8]),
    ];
    Layout::new(tensors, Some(r#"{"format":"pt","note":"Größe: 模型"}"#))
}
