-- update of one row: 1
UPDATE fenced_row SET n=%(volcano_value_1)s, fencing_token=%(volcano_offered)s, fencing_key=%(volcano_offered_key)s WHERE (fenced_row.id = %(volcano_value_0)s) AND fenced_row.fencing_token <= %(volcano_offered)s AND (fenced_row.fencing_key = %(volcano_offered_key)s OR fenced_row.fencing_key = '');

-- update of one row of a class bound to one lock: 1
UPDATE bound_row SET n=%(volcano_value_1)s, fencing_token=%(volcano_offered)s WHERE (bound_row.id = %(volcano_value_0)s) AND bound_row.fencing_token <= %(volcano_offered)s;

-- update of one row, stale: 2
UPDATE fenced_row SET n=%(volcano_value_1)s, fencing_token=%(volcano_offered)s, fencing_key=%(volcano_offered_key)s WHERE (fenced_row.id = %(volcano_value_0)s) AND fenced_row.fencing_token <= %(volcano_offered)s AND (fenced_row.fencing_key = %(volcano_offered_key)s OR fenced_row.fencing_key = '');
SELECT fenced_row.fencing_token, fenced_row.fencing_key FROM fenced_row WHERE (fenced_row.id = %(volcano_value_0)s) LIMIT %(param_1)s;

-- update of one row, missing: 3
UPDATE fenced_row SET n=%(volcano_value_2)s, fencing_token=%(volcano_offered)s, fencing_key=%(volcano_offered_key)s WHERE (fenced_row.id = %(volcano_value_0)s AND fenced_row.n = %(volcano_value_1)s) AND fenced_row.fencing_token <= %(volcano_offered)s AND (fenced_row.fencing_key = %(volcano_offered_key)s OR fenced_row.fencing_key = '');
SELECT fenced_row.fencing_token, fenced_row.fencing_key FROM fenced_row WHERE (fenced_row.id = %(volcano_value_0)s AND fenced_row.n = %(volcano_value_1)s) LIMIT %(param_1)s;
SELECT fenced_row.fencing_token, fenced_row.fencing_key FROM fenced_row WHERE (fenced_row.id = %(volcano_value_0)s AND fenced_row.n = %(volcano_value_1)s) LIMIT %(param_1)s FOR UPDATE;

-- update of many rows: 4
savepoint;
UPDATE fenced_row SET n=(fenced_row.n + %(volcano_value_1)s), fencing_token=%(volcano_offered)s, fencing_key=%(volcano_offered_key)s WHERE (fenced_row.n < %(volcano_value_0)s) AND fenced_row.fencing_token <= %(volcano_offered)s AND (fenced_row.fencing_key = %(volcano_offered_key)s OR fenced_row.fencing_key = '');
SELECT fenced_row.fencing_token, fenced_row.fencing_key FROM fenced_row WHERE (fenced_row.n < %(volcano_value_0)s) AND (fenced_row.fencing_token > %(fencing_token_1)s OR fenced_row.fencing_token IS NULL OR (fenced_row.fencing_key NOT IN (%(fencing_key_1_1)s, %(fencing_key_1_2)s)) OR fenced_row.fencing_key IS NULL) LIMIT %(param_1)s LOCK IN SHARE MODE;
release savepoint;

-- update of rows that a subquery names: 4
savepoint;
SELECT fenced_row.fencing_token, fenced_row.fencing_key FROM fenced_row WHERE (fenced_row.id IN (SELECT fenced_row_1.id FROM fenced_row AS fenced_row_1 WHERE fenced_row_1.n < %(volcano_value_0)s)) FOR UPDATE;
UPDATE fenced_row SET n=%(volcano_value_1)s, fencing_token=%(volcano_offered)s, fencing_key=%(volcano_offered_key)s WHERE (fenced_row.id IN (SELECT fenced_row_1.id FROM fenced_row AS fenced_row_1 WHERE fenced_row_1.n < %(volcano_value_0)s)) AND fenced_row.fencing_token <= %(volcano_offered)s AND (fenced_row.fencing_key = %(volcano_offered_key)s OR fenced_row.fencing_key = '');
release savepoint;

-- update of many rows, stale: 4
savepoint;
UPDATE fenced_row SET n=(fenced_row.n + %(volcano_value_1)s), fencing_token=%(volcano_offered)s, fencing_key=%(volcano_offered_key)s WHERE (fenced_row.n < %(volcano_value_0)s) AND fenced_row.fencing_token <= %(volcano_offered)s AND (fenced_row.fencing_key = %(volcano_offered_key)s OR fenced_row.fencing_key = '');
SELECT fenced_row.fencing_token, fenced_row.fencing_key FROM fenced_row WHERE (fenced_row.n < %(volcano_value_0)s) AND (fenced_row.fencing_token > %(fencing_token_1)s OR fenced_row.fencing_token IS NULL OR (fenced_row.fencing_key NOT IN (%(fencing_key_1_1)s, %(fencing_key_1_2)s)) OR fenced_row.fencing_key IS NULL) LIMIT %(param_1)s LOCK IN SHARE MODE;
rollback savepoint;

-- delete of one row: 1
DELETE FROM fenced_row WHERE (fenced_row.id = %(volcano_value_0)s) AND fenced_row.fencing_token <= %(volcano_offered)s AND (fenced_row.fencing_key = %(volcano_offered_key)s OR fenced_row.fencing_key = '');

-- delete of many rows: 5
savepoint;
DELETE FROM fenced_row WHERE fenced_row.fencing_token <= %(volcano_offered)s AND (fenced_row.fencing_key = %(volcano_offered_key)s OR fenced_row.fencing_key = '');
SELECT fenced_row.fencing_token, fenced_row.fencing_key FROM fenced_row WHERE fenced_row.fencing_token > %(fencing_token_1)s OR fenced_row.fencing_token IS NULL OR (fenced_row.fencing_key NOT IN (%(fencing_key_1_1)s, %(fencing_key_1_2)s)) OR fenced_row.fencing_key IS NULL LIMIT %(param_1)s LOCK IN SHARE MODE;
release savepoint;
SELECT fenced_row.id FROM fenced_row WHERE fenced_row.id IN (%(id_1_1)s);

-- upsert of a row that is there: 1
UPDATE fenced_row SET n=%(volcano_value_1)s, fencing_token=%(volcano_offered)s, fencing_key=%(volcano_offered_key)s WHERE (fenced_row.id = %(volcano_value_0)s) AND fenced_row.fencing_token <= %(volcano_offered)s AND (fenced_row.fencing_key = %(volcano_offered_key)s OR fenced_row.fencing_key = '');

-- upsert of a row that is not there: 6
UPDATE fenced_row SET n=%(volcano_value_1)s, fencing_token=%(volcano_offered)s, fencing_key=%(volcano_offered_key)s WHERE (fenced_row.id = %(volcano_value_0)s) AND fenced_row.fencing_token <= %(volcano_offered)s AND (fenced_row.fencing_key = %(volcano_offered_key)s OR fenced_row.fencing_key = '');
SELECT fenced_row.fencing_token, fenced_row.fencing_key FROM fenced_row WHERE (fenced_row.id = %(volcano_value_0)s) LIMIT %(param_1)s;
SELECT fenced_row.fencing_token, fenced_row.fencing_key FROM fenced_row WHERE (fenced_row.id = %(volcano_value_0)s) LIMIT %(param_1)s FOR UPDATE;
savepoint;
INSERT INTO fenced_row (id, n, fencing_token, fencing_key) VALUES (%(id)s, %(n)s, %(fencing_token)s, %(fencing_key)s);
release savepoint;

-- save of a loaded instance: 1
UPDATE fenced_row SET n=%(volcano_value_1)s, fencing_token=%(volcano_offered)s, fencing_key=%(volcano_offered_key)s WHERE (fenced_row.id = %(volcano_value_0)s) AND fenced_row.fencing_token <= %(volcano_offered)s AND (fenced_row.fencing_key = %(volcano_offered_key)s OR fenced_row.fencing_key = '');

-- transaction: 2
UPDATE volcano_locks_fence SET fencing_token=%(volcano_offered)s, advanced_at=%(volcano_now)s WHERE volcano_locks_fence.`key` = %(volcano_key)s AND volcano_locks_fence.fencing_token <= %(volcano_offered)s;
INSERT INTO note (id, text) VALUES (%(id)s, %(text)s);

-- transaction, stale: 2
UPDATE volcano_locks_fence SET fencing_token=%(volcano_offered)s, advanced_at=%(volcano_now)s WHERE volcano_locks_fence.`key` = %(volcano_key)s AND volcano_locks_fence.fencing_token <= %(volcano_offered)s;
SELECT volcano_locks_fence.fencing_token FROM volcano_locks_fence WHERE volcano_locks_fence.`key` = %(volcano_key)s LIMIT %(param_1)s;

