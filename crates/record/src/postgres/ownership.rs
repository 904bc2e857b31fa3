//! Who owns the schema. Triggers, rules and defaults run with the rights of whoever changes a table, so a schema that
//! another role has prepared would give it the rights of the role that migrates.

use super::client::Transaction;

use super::PostgresError;

/// What there is of the schema `tollgate`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Found {
    Nothing,
    /// A schema with nothing in it.
    Empty,
    /// One with a table of migrations.
    Ours,
}

/// Superusers can do anything anyway, so what they own is no danger.
const SCHEMA: &str = "
    SELECT pg_get_userbyid(nspowner)::text, current_user::text,
        (SELECT string_agg(CASE grantee WHEN 0 THEN 'PUBLIC' ELSE pg_get_userbyid(grantee)::text END, ', ')
            FROM aclexplode(nspacl)
            WHERE privilege_type = 'CREATE' AND grantee <> nspowner
                AND NOT EXISTS (SELECT FROM pg_roles WHERE oid = grantee AND rolsuper))
    FROM pg_namespace WHERE nspname = 'tollgate'";

/// An object in the schema that another role owns. Objects of the first superuser aren't recorded.
const OF_OTHERS: &str = "
    SELECT pg_describe_object(inside.classid, inside.objid, 0), rolname::text
    FROM pg_depend AS inside
        JOIN pg_shdepend AS owned ON (owned.classid, owned.objid, owned.deptype) = (inside.classid, inside.objid, 'o')
        JOIN pg_roles ON pg_roles.oid = owned.refobjid
    WHERE inside.refclassid = 'pg_namespace'::regclass AND inside.refobjid = to_regnamespace('tollgate')
        AND owned.dbid = (SELECT oid FROM pg_database WHERE datname = current_database())
        AND rolname <> current_user AND NOT rolsuper
    ORDER BY 1 LIMIT 1";

/// What belongs to a table of the schema (a trigger, rule, constraint, default, policy or index) and uses what another
/// role owns, such as a function.
const USING_OTHERS: &str = "
    SELECT pg_describe_object(uses.classid, uses.objid, 0),
        pg_describe_object(uses.refclassid, uses.refobjid, 0), rolname::text
    FROM pg_depend AS uses
        JOIN pg_shdepend AS owned ON (owned.classid, owned.objid, owned.deptype) = (uses.refclassid, uses.refobjid, 'o')
        JOIN pg_roles ON pg_roles.oid = owned.refobjid
    WHERE owned.dbid = (SELECT oid FROM pg_database WHERE datname = current_database())
        AND rolname <> current_user AND NOT rolsuper
        AND EXISTS (
            SELECT FROM pg_depend AS own JOIN pg_class ON pg_class.oid = own.refobjid
            WHERE (own.classid, own.objid) = (uses.classid, uses.objid) AND own.refclassid = 'pg_class'::regclass
                AND own.deptype IN ('a', 'i') AND relnamespace = to_regnamespace('tollgate'))
    ORDER BY 1 LIMIT 1";

/// Objects in the schema, which an empty one doesn't have. Default privileges for later objects aren't among them: its
/// owner sets these.
const INSIDE: &str = "
    SELECT pg_describe_object(classid, objid, 0) FROM pg_depend
    WHERE refclassid = 'pg_namespace'::regclass AND refobjid = to_regnamespace('tollgate')
        AND classid <> 'pg_default_acl'::regclass
    ORDER BY 1 LIMIT 1";

const MIGRATIONS: &str = "
    SELECT relkind = 'r' AND pg_get_userbyid(relowner) = current_user FROM pg_class
    WHERE oid = to_regclass('tollgate.migrations')";

/// Looks for the schema, and refuses one that anybody but this role could have put something in.
pub(super) async fn checked(transaction: &Transaction<'_>) -> Result<Found, PostgresError> {
    let Some(row) = transaction.query_opt(SCHEMA, &[]).await? else { return Ok(Found::Nothing) };
    let (owner, role, creators): (String, String, Option<String>) = (row.get(0), row.get(1), row.get(2));
    if owner != role {
        let remedy = "migrate as the owner, or drop the schema if nobody needs it";
        return Err(refused(&format!("owned by role {owner}, not by role {role}: {remedy}")));
    }
    if let Some(creators) = creators {
        return Err(refused(&format!("other roles may create objects in it: revoke CREATE from {creators}")));
    }
    if let Some(row) = transaction.query_opt(OF_OTHERS, &[]).await? {
        let (object, owner): (String, String) = (row.get(0), row.get(1));
        return Err(refused(&format!("{object} in it belongs to role {owner}, not to role {role}")));
    }
    if let Some(row) = transaction.query_opt(USING_OTHERS, &[]).await? {
        let (object, used, owner): (String, String, String) = (row.get(0), row.get(1), row.get(2));
        return Err(refused(&format!("{object} in it uses {used}, which belongs to role {owner}")));
    }
    let Some(row) = transaction.query_opt(MIGRATIONS, &[]).await? else {
        let Some(row) = transaction.query_opt(INSIDE, &[]).await? else { return Ok(Found::Empty) };
        let object: String = row.get(0);
        return Err(refused(&format!(
            "has {object}, but not tollgate's tables: empty it, or drop it if nobody needs it"
        )));
    };
    if !row.get::<_, bool>(0) {
        return Err(refused(&format!("tollgate.migrations isn't a table that role {role} owns")));
    }
    Ok(Found::Ours)
}

/// On one line, whatever others have named their objects.
fn refused(why: &str) -> PostgresError {
    let why: String = why.chars().map(|character| if character.is_control() { ' ' } else { character }).collect();
    PostgresError::refused(format!("schema tollgate: {why}"))
}
