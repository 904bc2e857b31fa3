//! `struct.pack` and `struct.unpack` as Redis's Lua has them, for little-endian integers of fixed size.

use mlua::{Lua, LuaString, MultiValue, Value, Variadic};

/// One item of a format: an integer of this many bytes.
#[derive(Clone, Copy)]
struct Item {
    size: usize,
    signed: bool,
}

/// Adds `struct` to the globals.
pub(super) fn install(lua: &Lua) -> mlua::Result<()> {
    let library = lua.create_table()?;
    library.set("pack", lua.create_function(pack)?)?;
    library.set("unpack", lua.create_function(unpack)?)?;
    lua.globals().set("struct", library)
}

/// Values beyond the format's items are ignored, as in Redis.
fn pack(lua: &Lua, (format, values): (LuaString, Variadic<Value>)) -> mlua::Result<LuaString> {
    let mut bytes = Vec::with_capacity(64);
    let mut values = values.into_iter();
    for item in items(&format.as_bytes()) {
        let Item { size, .. } = item?;
        let value = match values.next() {
            Some(Value::Integer(value)) => value,
            Some(Value::Number(value)) => value as i64,
            _ => return Err(mlua::Error::runtime("struct.pack: too few numbers")),
        };
        bytes.extend_from_slice(&value.to_le_bytes()[..size]);
    }
    lua.create_string(bytes)
}

/// The values, and the position after them.
fn unpack(_: &Lua, (format, bytes, from): (LuaString, LuaString, Option<usize>)) -> mlua::Result<MultiValue> {
    let bytes = bytes.as_bytes();
    let mut at = from.unwrap_or(1).saturating_sub(1);
    let mut values = MultiValue::new();
    for item in items(&format.as_bytes()) {
        let Item { size, signed } = item?;
        let part =
            bytes.get(at..at + size).ok_or_else(|| mlua::Error::runtime("struct.unpack: data string too short"))?;
        let negative = signed && part[size - 1] >= 0x80;
        let mut whole = [if negative { 0xff } else { 0 }; 8];
        whole[..size].copy_from_slice(part);
        values.push_back(Value::Number(i64::from_le_bytes(whole) as f64));
        at += size;
    }
    values.push_back(Value::Number((at + 1) as f64));
    Ok(values)
}

/// `<`, then `B`, or `I` and `i` with a size from 1 to 7.
fn items(format: &[u8]) -> impl Iterator<Item = mlua::Result<Item>> {
    let (order, mut rest) = format.split_at(usize::from(format.first() == Some(&b'<')));
    let little = !order.is_empty();
    std::iter::from_fn(move || {
        let (item, tail) = match rest {
            [] => return None,
            [b'B', tail @ ..] => (Ok(Item { size: 1, signed: false }), tail),
            [kind @ (b'I' | b'i'), size @ b'1'..=b'7', tail @ ..] => {
                (Ok(Item { size: usize::from(size - b'0'), signed: *kind == b'i' }), tail)
            }
            _ => (Err(mlua::Error::runtime("struct: expected < and then B, I1 to I7 or i1 to i7")), &[][..]),
        };
        rest = tail;
        Some(if little { item } else { Err(mlua::Error::runtime("struct: expected < first")) })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn evaluate(text: &str) -> String {
        let lua = Lua::new();
        install(&lua).unwrap();
        lua.load(text).eval::<String>().unwrap()
    }

    #[test]
    fn packs_as_redis_does() {
        // As printed by redis-cli for the same text.
        let hex = "(struct.pack('<I7i7BI3', 2^53, -2, 255, 4096):gsub('.', function(c) return ('%02x'):format(c:byte()) end))";
        assert_eq!(evaluate(&format!("return {hex}")), "00000000000020feffffffffffffff001000");
    }

    #[test]
    fn what_is_packed_is_unpacked() {
        let text = "local a, b, at = struct.unpack('<I7i7', 'x' .. struct.pack('<I7i7', 2^53, -2^53), 2)
            return tostring(a == 2^53 and b == -2^53 and at == 16)";
        assert_eq!(evaluate(text), "true");
    }
}
