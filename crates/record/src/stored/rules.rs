//! Rules in the database: written and read as a whole set.

use serde_json::{Map, Value};
use tollgate::rules::{RuleChanges, RuleSet};

use super::input;
use crate::postgres::client::Transaction;
use crate::postgres::{Postgres, PostgresError};

/// The key of a set's rules in its JSON.
const RULES: &str = "rule";

/// A set of rules as the database stores it.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct StoredRules {
    /// The enabled rules.
    pub rules: RuleSet,
    /// Version of the whole configuration; it grows with each change.
    pub version: i64,
}

/// A set as rows.
struct Stored {
    settings: Map<String, Value>,
    /// By name, in order.
    rules: Vec<(String, Value)>,
}

impl Postgres {
    /// Replaces the stored set of rules and returns what that changed: all of it or nothing, in one transaction.
    /// Unchanged rules aren't touched; disabled ones are enabled again. `by` says who does it, in at most 256 bytes;
    /// empty: the database's role.
    ///
    /// # Errors
    ///
    /// No connection; no tables; no right; a set without rules, which would allow everything; a name that is too long;
    /// text that contains NUL, which PostgreSQL doesn't store.
    pub async fn push_rules(&self, rules: &RuleSet, by: &str) -> Result<RuleChanges, PostgresError> {
        input::by(by)?;
        if rules.is_empty() {
            return Err(PostgresError::input("rules: the set has none, which would allow everything"));
        }
        let after = Stored::of(rules)?;
        self.change(async |transaction| {
            let changes = after.changes_from(&stored(transaction).await?);
            if changes.settings {
                let update = "UPDATE tollgate.configuration SET settings = $1::text::jsonb";
                transaction.execute(update, &[&Value::Object(after.settings.clone()).to_string()]).await?;
            }
            if !changes.removed.is_empty() {
                let delete = "DELETE FROM tollgate.rate_limit_rules WHERE name = ANY ($1)";
                transaction.execute(delete, &[&changes.removed]).await?;
            }
            if changes.has_rules() {
                write(transaction, &after, by).await?;
            }
            Ok(changes)
        })
        .await
    }

    /// What [`push_rules`](Self::push_rules) would change.
    ///
    /// # Errors
    ///
    /// No connection; no tables; no right.
    pub async fn compare_rules(&self, rules: &RuleSet) -> Result<RuleChanges, PostgresError> {
        let stored = self.at_one_moment(async |transaction| stored(transaction).await).await?;
        Ok(Stored::of(rules)?.changes_from(&stored))
    }

    /// The set of rules that is in force.
    ///
    /// # Errors
    ///
    /// No connection; no tables; rules that were written by hand and can't be used.
    pub async fn rules(&self) -> Result<StoredRules, PostgresError> {
        self.at_one_moment(async |transaction| {
            let version = transaction.query_one("SELECT version FROM tollgate.configuration", &[]).await?.get(0);
            Ok(StoredRules { rules: read(transaction).await?, version })
        })
        .await
    }
}

impl Stored {
    fn of(rules: &RuleSet) -> Result<Self, PostgresError> {
        let unusable = |why: &str| PostgresError::input(format!("rules: {why}"));
        let Value::Object(mut settings) = serde_json::to_value(rules).map_err(|error| unusable(&error.to_string()))?
        else {
            return Err(unusable("expected a table"));
        };
        let rules = match settings.remove(RULES) {
            Some(Value::Array(rules)) => rules,
            _ => Vec::new(),
        };
        let named = rules.into_iter().map(|rule| (rule["name"].as_str().unwrap_or_default().to_owned(), rule));
        Ok(Self { settings, rules: named.collect() })
    }

    fn changes_from(&self, before: &Self) -> RuleChanges {
        RuleChanges::between(&before.rules, &self.rules, before.settings != self.settings)
    }

    fn into_rules(self) -> Result<RuleSet, PostgresError> {
        let mut document = self.settings;
        document.insert(RULES.to_owned(), self.rules.into_iter().map(|(_, rule)| rule).collect());
        serde_json::from_value(Value::Object(document))
            .map_err(|error| PostgresError::input(format!("rules in the database: {error}")))
    }
}

/// The rules in force.
pub(crate) async fn read(transaction: &Transaction<'_>) -> Result<RuleSet, PostgresError> {
    stored(transaction).await?.into_rules()
}

async fn stored(transaction: &Transaction<'_>) -> Result<Stored, PostgresError> {
    let unreadable = |error: serde_json::Error| PostgresError::input(format!("rules in the database: {error}"));
    let settings = transaction.query_one("SELECT settings::text FROM tollgate.configuration", &[]).await?;
    let settings = serde_json::from_str(settings.get(0)).map_err(unreadable)?;
    let select = "SELECT name, definition::text FROM tollgate.rate_limit_rules WHERE enabled ORDER BY place, name";
    let rows = transaction.query(select, &[]).await?;
    let rules = rows.iter().map(|row| Ok((row.get(0), serde_json::from_str(row.get(1)).map_err(unreadable)?)));
    Ok(Stored { settings, rules: rules.collect::<Result<_, PostgresError>>()? })
}

/// Writes all rules with one statement; unchanged ones keep their time.
async fn write(transaction: &Transaction<'_>, stored: &Stored, by: &str) -> Result<(), PostgresError> {
    let upsert = "
        INSERT INTO tollgate.rate_limit_rules AS rule (name, place, definition, updated_by)
        SELECT name, place, definition::jsonb, coalesce(nullif($4, ''), current_user)
        FROM unnest($1::text[], $2::int4[], $3::text[]) AS pushed (name, place, definition)
        ON CONFLICT (name) DO UPDATE
        SET place = excluded.place, definition = excluded.definition, enabled = true, updated_at = now(),
            updated_by = excluded.updated_by
        WHERE (rule.place, rule.definition, rule.enabled) IS DISTINCT FROM (excluded.place, excluded.definition, true)";
    let names: Vec<_> = stored.rules.iter().map(|(name, _)| name.as_str()).collect();
    let places: Vec<_> = (0..).take(names.len()).collect::<Vec<i32>>();
    let definitions: Vec<_> = stored.rules.iter().map(|(_, rule)| rule.to_string()).collect();
    transaction.execute(upsert, &[&names, &places, &definitions, &by]).await?;
    Ok(())
}
