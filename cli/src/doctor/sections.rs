//! What the report says about each finding.

use fedlane::limits;
use fedlane::probe::{
    CpuReport, Direction, Fact, Feature, HostReport, Limit, MemoryReport, PathReport,
    ResourceLimit, SharedMemory, SocketReport, State,
};
use indicatif::BinaryBytes;

use super::Findings;
use super::layout::{Line, Mark, Section};

/// Fewer open files than this bound even a small session.
const FEW_OPEN_FILES: u64 = 1024;

/// Less locked memory than this does not hold the pages of one send in flight.
const SMALL_LOCKED_BYTES: u64 = limits::SEND_STEP_BYTES;

pub fn all(findings: &Findings) -> Vec<Section> {
    let host = &findings.host;
    vec![
        Section { title: "Host", lines: host_lines(host) },
        Section { title: "Memory", lines: memory_lines(&host.memory) },
        Section { title: "Sockets", lines: socket_lines(&host.sockets) },
        Section { title: "Ways to send", lines: path_lines(findings, Direction::Send) },
        Section { title: "Ways to receive", lines: path_lines(findings, Direction::Receive) },
        Section {
            title: "Other kernel features",
            lines: host.features.iter().map(feature_line).collect(),
        },
    ]
}

/// The last line: what fedlane will do here.
pub fn verdict(findings: &Findings) -> String {
    let receive = findings.defaults.receive_path;
    let send = match &findings.defaults.send_path {
        Fact::Known(name) => *name,
        Fact::Unknown { unknown } => return format!("fedlane cannot run here: {unknown}"),
    };
    let verdict = format!("By default fedlane sends with {send} and receives with {receive} here");
    let works = |name, direction| {
        let mut paths = findings.paths.iter().filter(|path| path.direction == direction);
        paths.any(|path| path.works && path.name == name)
    };
    let broken = match (works(send, Direction::Send), works(receive, Direction::Receive)) {
        (true, true) => return verdict + ".",
        (false, true) => instead(findings, Direction::Send, send),
        (true, false) => instead(findings, Direction::Receive, receive),
        (false, false) => "neither could be shown to work, see above".to_string(),
    };
    format!("{verdict}, but {broken}.")
}

/// What to do about a default that does not work.
fn instead(findings: &Findings, direction: Direction, broken: &str) -> String {
    let usable =
        |path: &&PathReport| path.direction == direction && path.works && !path.drops_bytes;
    let option = match direction {
        Direction::Send => "--send-path",
        Direction::Receive => "--receive-path",
    };
    match findings.paths.iter().find(usable) {
        Some(path) => format!("{broken} does not work: choose {option} {}", path.name),
        None => format!("neither {broken} nor anything else works, see above"),
    }
}

/// A line about something looked up; what is unknown is worth a note.
fn fact_line<T>(name: &'static str, fact: &Fact<T>, line: impl FnOnce(&T) -> Line) -> Line {
    match fact {
        Fact::Known(value) => line(value),
        Fact::Unknown { unknown } => Line::new(Mark::Note, name, format!("unknown: {unknown}")),
    }
}

/// A line about something looked up that is neither good nor bad.
fn plain_line<T>(name: &'static str, fact: &Fact<T>, text: impl FnOnce(&T) -> String) -> Line {
    fact_line(name, fact, |value| Line::new(Mark::Ok, name, text(value)))
}

fn host_lines(host: &HostReport) -> Vec<Line> {
    vec![
        Line::new(Mark::Ok, "kernel", format!("{}, {}", host.kernel, host.architecture)),
        cores_line(&host.cpu),
        quota_line(&host.cpu),
        instructions_line(&host.cpu),
    ]
}

fn cores_line(cpu: &CpuReport) -> Line {
    let name = "cores";
    let Fact::Known(online) = cpu.cores_online else {
        return plain_line(name, &cpu.cores_usable, |usable| format!("{usable} usable"));
    };
    fact_line(name, &cpu.cores_usable, |&usable| {
        if usable >= online {
            return Line::new(Mark::Ok, name, format!("{online}, all usable"));
        }
        let line = Line::new(Mark::Note, name, format!("{usable} usable of {online}"));
        match cpu.cores_in_affinity_mask.known() {
            Some(&mask) if mask < online => {
                line.and(format!("the affinity mask of this process leaves {mask}"))
            }
            _ => line,
        }
    })
}

fn quota_line(cpu: &CpuReport) -> Line {
    let name = "CPU quota";
    fact_line(name, &cpu.cgroup_limits, |limits| {
        if limits.is_empty() {
            return Line::new(Mark::Ok, name, "none");
        }
        let texts = limits
            .iter()
            .flat_map(|limit| [format!("{} cores, set in", limit.cores), limit.file.clone()]);
        Line { mark: Mark::Note, name, texts: texts.collect() }
    })
}

fn instructions_line(cpu: &CpuReport) -> Line {
    let with = |present| {
        let names = cpu.features.iter().filter(|feature| feature.present == present);
        names.map(|feature| feature.name).collect::<Vec<_>>().join(" ")
    };
    let (present, missing) = (with(true), with(false));
    let name = "vector instructions";
    match (present.as_str(), missing.as_str()) {
        ("", "") => Line::new(Mark::Ok, name, "none are known for this architecture"),
        (present, "") => Line::new(Mark::Ok, name, present),
        ("", missing) => Line::new(Mark::Note, name, format!("none; missing: {missing}")),
        (present, missing) => {
            Line::new(Mark::Note, name, present).and(format!("missing: {missing}"))
        }
    }
}

fn memory_lines(memory: &MemoryReport) -> Vec<Line> {
    vec![
        memory_line(memory),
        cgroup_line(memory),
        room_line(memory),
        feature_line(&memory.region.huge),
        plain_line("transparent huge pages", &memory.transparent_huge_pages, |choice| {
            let files = match &memory.transparent_huge_pages_of_memory_files {
                Fact::Known(choice) => choice.clone(),
                Fact::Unknown { unknown } => format!("unknown: {unknown}"),
            };
            format!("{choice}; of memory files: {files}")
        }),
        plain_line("reserved huge pages", &memory.reserved_huge_pages, |pools| {
            let pools = pools.iter().filter(|pool| pool.pages > 0).map(|pool| {
                let size = BinaryBytes(pool.page_bytes);
                format!("{} of {size}, {} free", pool.pages, pool.free_pages)
            });
            let pools = pools.collect::<Vec<_>>().join("; ");
            if pools.is_empty() { "none; fedlane needs none".to_string() } else { pools }
        }),
        dev_shm_line(&memory.dev_shm),
        address_space_line(&memory.address_space_limit_bytes),
        locked_line(&memory.locked_memory_limit_bytes),
    ]
}

fn memory_line(memory: &MemoryReport) -> Line {
    let name = "memory";
    fact_line(name, &memory.memory_available_bytes, |&available| {
        plain_line(name, &memory.memory_total_bytes, |&total| {
            format!("{} available of {}", BinaryBytes(available), BinaryBytes(total))
        })
    })
}

fn room_line(memory: &MemoryReport) -> Line {
    let name = "room for a model";
    fact_line(name, &memory.allocatable_bytes, |&bytes| {
        let room = bytes.saturating_sub(limits::MEMORY_RESERVE_BYTES);
        let mark = if room == 0 { Mark::Off } else { Mark::Ok };
        let reserve = BinaryBytes(limits::MEMORY_RESERVE_BYTES);
        Line::new(mark, name, format!("{}; {reserve} are left free", BinaryBytes(room)))
            .and(format!("bounded by {}", memory.allocatable_bound))
    })
}

fn cgroup_line(memory: &MemoryReport) -> Line {
    let name = "memory limits (cgroup)";
    fact_line(name, &memory.cgroup_limits, |limits| {
        if limits.is_empty() {
            return Line::new(Mark::Ok, name, "none");
        }
        let texts = limits.iter().flat_map(|limit| {
            let used = match &limit.used_bytes {
                Fact::Known(bytes) => format!("{} used", BinaryBytes(*bytes)),
                Fact::Unknown { .. } => "use unknown".to_string(),
            };
            let bound = BinaryBytes(limit.limit_bytes);
            [format!("{bound}, {used}, set in"), limit.file.clone()]
        });
        Line { mark: Mark::Note, name, texts: texts.collect() }
    })
}

fn dev_shm_line(dev_shm: &Fact<SharedMemory>) -> Line {
    let name = "/dev/shm";
    let line = fact_line(name, dev_shm, |shm| {
        let (size, free) = (BinaryBytes(shm.size_bytes), BinaryBytes(shm.free_bytes));
        match shm.tmpfs && shm.mounted {
            true => Line::new(Mark::Ok, name, format!("{size}, {free} free")),
            false => Line::new(Mark::Note, name, "no memory is mounted there"),
        }
    });
    line.and("fedlane does not use it: its regions are memory files without a mount")
}

fn limit_text(limit: Limit) -> String {
    match limit {
        Limit::At(bytes) => BinaryBytes(bytes).to_string(),
        Limit::Unlimited => "unlimited".to_string(),
    }
}

fn address_space_line(limit: &ResourceLimit) -> Line {
    let name = "address space limit";
    match limit.soft {
        Limit::Unlimited => Line::new(Mark::Ok, name, "unlimited"),
        soft => Line::new(Mark::Note, name, limit_text(soft))
            .and("a model that is larger cannot be held")
            .and("helps: ulimit -v unlimited"),
    }
}

fn locked_line(limit: &ResourceLimit) -> Line {
    let mark = match limit.soft {
        Limit::At(bytes) if bytes < SMALL_LOCKED_BYTES => Mark::Note,
        _ => Mark::Ok,
    };
    Line::new(mark, "locked memory limit", limit_text(limit.soft))
        .and("bounds only MSG_ZEROCOPY and io_uring, and not for root")
}

fn socket_lines(sockets: &SocketReport) -> Vec<Line> {
    vec![
        open_files_line(&sockets.open_files_limit),
        pipe_line(sockets),
        plain_line("receive buffer (tcp)", &sockets.tcp_receive_buffer_bytes, |sizes| {
            format!("{} at first, {} at most", BinaryBytes(sizes.default), BinaryBytes(sizes.max))
        }),
        plain_line("send buffer (tcp)", &sockets.tcp_send_buffer_bytes, |sizes| {
            format!("{} at first, {} at most", BinaryBytes(sizes.default), BinaryBytes(sizes.max))
        }),
        plain_line("receive buffer by wish", &sockets.receive_buffer_max_bytes, |&bytes| {
            format!("{} at most", BinaryBytes(bytes))
        }),
        plain_line("send buffer by wish", &sockets.send_buffer_max_bytes, |&bytes| {
            format!("{} at most", BinaryBytes(bytes))
        }),
        congestion_line(sockets),
        feature_line(&sockets.cubic).and("fedlane takes it between processes of one host"),
    ]
}

fn open_files_line(limit: &ResourceLimit) -> Line {
    let name = "open files limit";
    let text = |limit| match limit {
        Limit::At(files) => files.to_string(),
        Limit::Unlimited => "unlimited".to_string(),
    };
    let line =
        |mark| Line::new(mark, name, format!("{}, up to {}", text(limit.soft), text(limit.hard)));
    match limit.soft {
        Limit::At(files) if files < FEW_OPEN_FILES => line(Mark::Note)
            .and("an aggregator holds a socket for each client and one for each of its lanes")
            .and("helps: ulimit -n 4096, or LimitNOFILE= of a service"),
        _ => line(Mark::Ok),
    }
}

fn pipe_line(sockets: &SocketReport) -> Line {
    let name = "pipes";
    fact_line(name, &sockets.pipe_granted_bytes, |&granted| {
        let text = match &sockets.pipe_max_bytes {
            Fact::Known(most) => {
                format!("{} granted, {} at most", BinaryBytes(granted), BinaryBytes(*most))
            }
            Fact::Unknown { .. } => format!("{} granted", BinaryBytes(granted)),
        };
        if granted >= limits::PIPE_BYTES as u64 {
            return Line::new(Mark::Ok, name, text);
        }
        let wanted = limits::PIPE_BYTES;
        Line::new(Mark::Note, name, format!("{text}; {} wanted", BinaryBytes(wanted as u64)))
            .and(format!("helps: as root: sysctl fs.pipe-max-size={wanted}"))
    })
}

fn congestion_line(sockets: &SocketReport) -> Line {
    plain_line("congestion control", &sockets.congestion_control, |current| {
        let list = |fact: &Fact<Vec<String>>| match fact {
            Fact::Known(names) => names.join(" "),
            Fact::Unknown { .. } => "unknown".to_string(),
        };
        format!(
            "{current}; there are {}; every user may choose {}",
            list(&sockets.congestion_controls_available),
            list(&sockets.congestion_controls_allowed)
        )
    })
}

fn path_lines(findings: &Findings, direction: Direction) -> Vec<Line> {
    let paths = findings.paths.iter().filter(|path| path.direction == direction);
    paths.map(path_line).collect()
}

fn path_line(path: &PathReport) -> Line {
    let mark = match path.works {
        true if path.drops_bytes => Mark::Note,
        true => Mark::Ok,
        false => Mark::Off,
    };
    let outcome = match path.works {
        true => format!("works: {} {}", BinaryBytes(path.moved_bytes), path.detail),
        false => format!("does not work: {}", path.detail),
    };
    Line::new(mark, path.name, path.summary).and(outcome).helps(path.remedy.as_ref())
}

fn feature_line(feature: &Feature) -> Line {
    let (mark, text) = match feature.state {
        State::Ok => (Mark::Ok, feature.detail.clone()),
        State::Off => (Mark::Off, feature.detail.clone()),
        State::Unknown => (Mark::Note, format!("unknown: {}", feature.detail)),
    };
    Line::new(mark, feature.name, text).helps(feature.remedy.as_ref())
}
