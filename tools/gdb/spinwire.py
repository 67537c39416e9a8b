"""Pretty-printers of gdb for the public types of Spinwire.

gdb loads this file with libspinwire.so if it is installed in gdb's auto-load folder. Otherwise:

    (gdb) source /usr/local/share/gdb/spinwire.py

Nothing in the program is called, so the printers also work on core files. What a connection or
session is doing needs the library's debug information; without it, handles show their numbers.
`print/r` shows a value without its printer.
"""

import struct

import gdb
import gdb.printing

NONE32 = 0xFFFFFFFF
NONE64 = 0xFFFFFFFFFFFFFFFF


def first_pointer(value):
    """The first pointer within a value of the standard library: a unique_ptr, vector or string."""
    kind = value.type.strip_typedefs()
    if kind.code == gdb.TYPE_CODE_PTR:
        return value
    if kind.code != gdb.TYPE_CODE_STRUCT:
        return None
    for field in kind.fields():
        if not hasattr(field, "bitpos"):  # static
            continue
        found = first_pointer(value[field])
        if found is not None:
            return found
    return None


def text_of(value):
    """The text of a std::string or std::string_view."""
    fields = [field.name for field in value.type.strip_typedefs().fields()]
    if "_M_string_length" in fields:
        start, size = value["_M_dataplus"]["_M_p"], value["_M_string_length"]
    elif "_M_str" in fields:
        start, size = value["_M_str"], value["_M_len"]
    else:
        return value.format_string()
    return start.string("utf-8", "replace", length=int(size)) if int(size) != 0 else ""


def name_of(value):
    """The enumerator of a value, or the enumerators of flags, without their scope."""
    number = int(value)
    names = {}
    for field in value.type.strip_typedefs().fields():
        names.setdefault(field.enumval, field.name.split("::")[-1])
    if number in names:
        return names[number]
    flags = [flag for flag in sorted(names) if flag & (flag - 1) == 0 and flag & number]
    if flags and sum(flags) == number:
        return " | ".join(names[flag] for flag in flags)
    return "unknown (%d)" % number


def bytes_at(size, address):
    return "%d bytes at 0x%x" % (int(size), int(address))


def time_of(duration):
    ns = int(duration["__r"])
    for unit, name in ((10**9, "s"), (10**6, "ms"), (10**3, "us")):
        if ns % unit == 0 and ns != 0:
            return "%d %s" % (ns // unit, name)
    return "%d ns" % ns


class Gone(Exception):
    """Why the object of a handle cannot be shown."""


def engine_at(slot):
    """The engine of a handle. None: the library's debug information is missing."""
    try:
        layout = gdb.lookup_type("spinwire::detail::EngineSlot").pointer()
        core = gdb.lookup_type("spinwire::detail::EngineCore").pointer()
        target = slot.cast(layout)["target"]
    except gdb.error:
        return None
    if int(target) == 0:
        raise Gone("the engine is closed")
    return target.cast(core).dereference()


def object_at(pool, index):
    """The object of a base::IndexPool at an index, in use or not."""
    if index >= int(pool["capacity_"]):
        raise Gone("closed")
    kind = pool.type.strip_typedefs().template_argument(0).pointer()
    return (first_pointer(pool["objects_"]["memory_"]).cast(kind) + index).dereference()


def record_at(table, index):
    """The record of an rpc::SessionTable."""
    record = object_at(table["entries_"], index)["record"]
    if int(record) == 0:
        raise Gone("closed")
    return record.dereference()


def calls_of(core):
    calls = first_pointer(core["calls"])
    if int(calls) == 0:
        raise Gone("closed")
    return calls.dereference()


def index_of_name(name):
    """The index in an rpc name: wire::RpcName."""
    return name & 0xFFFFF


class Printer:
    """Prints "Type (what it is)"."""

    def __init__(self, value):
        self.value = value

    def to_string(self):
        kind = self.value.type.strip_typedefs().name.split("::")[-1]
        return "%s (%s)" % (kind, self.describe())


class Handle(Printer):
    """A handle: the name of an object of an engine."""

    def describe(self):
        slot = self.value["slot_"]
        if int(slot) == 0:
            return "empty"
        name = self.name()
        try:
            core = engine_at(slot)
            state = self.state(core) if core is not None else None
        except Gone as why:
            state = str(why)
        return "%s, %s" % (name, state) if state else name

    def name(self):
        return "%d-%d" % (int(self.value["index_"]), int(self.value["generation_"]))

    def state(self, core):
        return None


class Connection(Handle):
    def state(self, core):
        agent = object_at(core["context"]["agents"], int(self.value["index_"]))
        if int(agent["generation"]) != int(self.value["generation_"]):
            raise Gone("closed")
        peer = agent["peer"]["name"]["_M_elems"].string("utf-8", "replace")
        return "%s, peer %s" % (name_of(agent["state"]), peer or "unknown")


class Session(Handle):
    def name(self):
        id = int(self.value["id_"])
        return "%d-%d" % (index_of_name(id & NONE32), id >> 32)

    def state(self, core):
        id = int(self.value["id_"])
        session = record_at(calls_of(core)["clients"], index_of_name(id & NONE32))
        if int(session["name"]) | int(session["generation"]) << 32 != id:
            raise Gone("closed")
        return "%s, server %s" % (name_of(session["state"]), text_of(session["address"]))


class ServedSession(Handle):
    def name(self):
        index = index_of_name(int(self.value["name_"]))
        return "%d-%d" % (index, int(self.value["generation_"]))

    def state(self, core):
        name = int(self.value["name_"])
        session = record_at(calls_of(core)["servers"], index_of_name(name))
        if int(session["name"]) != name:
            raise Gone("closed")
        address = first_pointer(session["peer"]).dereference()["address"]
        text = address["text"]["_M_elems"].string("utf-8", "replace", length=int(address["length"]))
        return "client %s" % text


class PendingCall(Handle):
    def name(self):
        call = self.value["call_"]
        session = index_of_name(int(call["session"]))
        transport = name_of(call["transport"])
        return "call %d of session %d by %s" % (int(call["number"]), session, transport)


class RemoteMemory(Handle):
    def name(self):
        return "lease %d" % int(self.value["lease_"])

    def state(self, core):
        lease = int(self.value["lease_"])
        held = first_pointer(core["context"]["leases"])
        if int(held) == 0:
            raise Gone("returned")
        table = held.dereference()["held"]
        entries = first_pointer(table["names_"]["entries_"])
        count = int(table["records_"]["capacity_"])
        names = gdb.selected_inferior().read_memory(int(entries), 8 * count)
        for index, (name, _) in enumerate(struct.iter_unpack("<II", names.tobytes())):
            if name != lease:
                continue
            record = object_at(table["records_"], index)
            if int(record["id"]) == lease and name_of(record["state"]) == "held":
                region = record["region"]
                return "%d bytes, %s" % (int(region["length"]), name_of(region["access"]))
        raise Gone("returned")


class Engine(Printer):
    def describe(self):
        pointer = first_pointer(self.value["core_"])
        if int(pointer) == 0:
            return "closed"
        core = pointer.dereference()
        if not core.type.strip_typedefs().fields():
            return "open"
        context = core["context"]
        device = first_pointer(context["device"])
        if int(device) == 0:
            return "opening"
        counts = [(int(context["agents"]["size_"]), "connection")]
        calls = first_pointer(core["calls"])
        if int(calls) != 0:
            rpc = calls.dereference()
            counts.append((int(rpc["clients"]["entries_"]["size_"]), "session"))
            counts.append((int(rpc["servers"]["entries_"]["size_"]), "served session"))
        name = text_of(device.dereference()["info_"]["name"])
        return "%s, %s" % (name, ", ".join(counted(*count) for count in counts))


def counted(count, noun):
    return "%d %s%s" % (count, noun, "" if count == 1 else "s")


class Buffer(Printer):
    def describe(self):
        block = self.value["block_"]
        if int(block) == 0:
            return "empty"
        held = block.dereference()
        used = "%d of %s" % (int(self.value["size_"]), bytes_at(held["capacity"], held["payload"]))
        return "%s, %s" % (used, counted(int(held["refs"]), "reference"))


class Bytes(Printer):
    """Bytes that a value refers to: BufferSlice, Message, Request, Reply."""

    def describe(self):
        parts = []
        kind = self.value.type.strip_typedefs()
        fields = [field.name for field in kind.fields()]
        if "method_" in fields:
            parts.append("method %d" % int(self.value["method_"]))
        if "status_" in fields:
            parts.append(name_of(self.value["status_"]))
        if int(self.value["data_"]) == 0 and int(self.value["size_"]) == 0:
            parts.append("empty")
        else:
            parts.append(bytes_at(self.value["size_"], self.value["data_"]))
        if "has_immediate_" in fields and self.value["has_immediate_"]:
            parts.append("immediate 0x%x" % int(self.value["immediate_"]))
        return ", ".join(parts)


class MemoryRegion(Printer):
    def describe(self):
        whole = self.value["whole_"]
        if int(whole["block_"]) == 0:
            return "empty"
        return "%s, %s" % (
            bytes_at(whole["size_"], whole["data_"]),
            name_of(self.value["remote_"]["access"]),
        )


class RemoteRegion(Printer):
    def describe(self):
        lease, timed = int(self.value["lease"]), int(self.value["timed_rkey"])
        if lease != 0:
            key = "lease %d" % lease
        elif timed != 0:
            key = "rkey 0x%x with a deadline" % timed
        elif int(self.value["rkey"]) != 0:
            key = "rkey 0x%x" % int(self.value["rkey"])
        else:
            return "empty"
        where = bytes_at(self.value["length"], self.value["address"])
        return "%s, %s, %s" % (where, name_of(self.value["access"]), key)


class Id(Printer):
    """The id of an operation, a call or a lease."""

    def describe(self):
        value = int(self.value["value"])
        return "empty" if value in (NONE32, NONE64) else "%d" % value


class Goodbye(Printer):
    def describe(self):
        after = self.value["retry_after"]
        if int(after["__r"]) == 0:
            return name_of(self.value["reason"])
        return "%s, back after %s" % (name_of(self.value["reason"]), time_of(after))


class Error(Printer):
    def describe(self):
        asked, found, remedy = (text_of(self.value[f]) for f in ("asked", "found", "remedy"))
        text = ": ".join(part for part in (name_of(self.value["status"]), asked, found) if part)
        return "%s; %s" % (text, remedy) if remedy else text


class Enumerator:
    def __init__(self, value):
        self.value = value

    def to_string(self):
        return name_of(self.value)


class Result:
    """tl::expected<T, Error>."""

    def __init__(self, value):
        self.value = value
        self.is_ok = bool(value["m_has_val"])

    def to_string(self):
        return "Result (ok)" if self.is_ok else "Result (failed)"

    def children(self):
        if not self.is_ok:
            yield "error", self.value["m_unexpect"]["m_val"]
        elif self.value.type.strip_typedefs().template_argument(0).code != gdb.TYPE_CODE_VOID:
            yield "value", self.value["m_val"]


PRINTERS = {
    "Buffer": Buffer,
    "BufferSlice": Bytes,
    "CallId": Id,
    "Connection": Connection,
    "Engine": Engine,
    "Error": Error,
    "Goodbye": Goodbye,
    "LeaseId": Id,
    "Listener": Handle,
    "MemoryRegion": MemoryRegion,
    "Message": Bytes,
    "OperationId": Id,
    "PendingCall": PendingCall,
    "RemoteMemory": RemoteMemory,
    "RemoteRegion": RemoteRegion,
    "Reply": Bytes,
    "Request": Bytes,
    "ServedSession": ServedSession,
    "Session": Session,
    "Timer": Handle,
}


class Lookup(gdb.printing.PrettyPrinter):
    """Finds the printer of a value, or none."""

    def __call__(self, value):
        kind = value.type.strip_typedefs()
        name = kind.name or ""
        if name.startswith("tl::expected<") and name.endswith(", spinwire::Error>"):
            return Result(value)
        if not name.startswith("spinwire::"):
            return None
        if kind.code == gdb.TYPE_CODE_ENUM:
            return Enumerator(value)
        printer = PRINTERS.get(name[len("spinwire::") :])
        return printer(value) if printer is not None else None


gdb.printing.register_pretty_printer(None, Lookup("spinwire"), replace=True)
