//! Decisions as the tool prints them: the names and units of its output.

use std::time::Duration;

use super::{Decision, RetryAfter};

impl serde::Serialize for Decision {
    /// Uses the names and units of the tool's output: `retry_after_us` is null, a number or `"never"`.
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        use serde::ser::SerializeStruct;
        let mut fields = serializer.serialize_struct(
            "Decision",
            6 + [self.blocked, self.overage.is_some(), self.by.error().is_some()]
                .into_iter()
                .map(usize::from)
                .sum::<usize>(),
        )?;
        fields.serialize_field("allowed", &self.allowed)?;
        fields.serialize_field("limit", &self.capacity)?;
        fields.serialize_field("remaining", &self.remaining)?;
        fields.serialize_field("retry_after_us", &self.retry_after)?;
        fields.serialize_field("reset_after_us", &micros(self.reset_after))?;
        fields.serialize_field("by", &self.by.name())?;
        // As in that output: a block only if there is one, denials only if they are counted, an error's class only if
        // something else answered for Redis.
        if self.blocked {
            fields.serialize_field("blocked", &true)?;
        }
        if let Some(overage) = self.overage {
            fields.serialize_field("overage", &overage)?;
        }
        if let Some(error) = self.by.error() {
            fields.serialize_field("error", error.kind().name())?;
        }
        fields.end()
    }
}

impl serde::Serialize for RetryAfter {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Now => serializer.serialize_none(),
            Self::After(wait) => serializer.serialize_u64(micros(*wait)),
            Self::Never => serializer.serialize_str("never"),
        }
    }
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}
