-- update of one row: 1
UPDATE fenced_row SET n=%(volcano_value_1)s::INTEGER, fencing_token=%(volcano_offered)s::BIGINT, fencing_key=%(volcano_offered_key)s::VARCHAR WHERE (fenced_row.id = %(volcano_value_0)s::INTEGER) AND fenced_row.fencing_token <= %(volcano_offered)s::BIGINT AND (fenced_row.fencing_key = %(volcano_offered_key)s::VARCHAR OR fenced_row.fencing_key = '');

-- update of one row of a class bound to one lock: 1
UPDATE bound_row SET n=%(volcano_value_1)s::INTEGER, fencing_token=%(volcano_offered)s::BIGINT WHERE (bound_row.id = %(volcano_value_0)s::INTEGER) AND bound_row.fencing_token <= %(volcano_offered)s::BIGINT;

-- update of one row, stale: 2
UPDATE fenced_row SET n=%(volcano_value_1)s::INTEGER, fencing_token=%(volcano_offered)s::BIGINT, fencing_key=%(volcano_offered_key)s::VARCHAR WHERE (fenced_row.id = %(volcano_value_0)s::INTEGER) AND fenced_row.fencing_token <= %(volcano_offered)s::BIGINT AND (fenced_row.fencing_key = %(volcano_offered_key)s::VARCHAR OR fenced_row.fencing_key = '');
SELECT fenced_row.fencing_token, fenced_row.fencing_key FROM fenced_row WHERE (fenced_row.id = %(volcano_value_0)s::INTEGER) LIMIT %(param_1)s::INTEGER;

-- update of one row, missing: 3
UPDATE fenced_row SET n=%(volcano_value_2)s::INTEGER, fencing_token=%(volcano_offered)s::BIGINT, fencing_key=%(volcano_offered_key)s::VARCHAR WHERE (fenced_row.id = %(volcano_value_0)s::INTEGER AND fenced_row.n = %(volcano_value_1)s::INTEGER) AND fenced_row.fencing_token <= %(volcano_offered)s::BIGINT AND (fenced_row.fencing_key = %(volcano_offered_key)s::VARCHAR OR fenced_row.fencing_key = '');
SELECT fenced_row.fencing_token, fenced_row.fencing_key FROM fenced_row WHERE (fenced_row.id = %(volcano_value_0)s::INTEGER AND fenced_row.n = %(volcano_value_1)s::INTEGER) LIMIT %(param_1)s::INTEGER;
SELECT fenced_row.fencing_token, fenced_row.fencing_key FROM fenced_row WHERE (fenced_row.id = %(volcano_value_0)s::INTEGER AND fenced_row.n = %(volcano_value_1)s::INTEGER) LIMIT %(param_1)s::INTEGER FOR UPDATE;

-- update of many rows: 4
savepoint;
UPDATE fenced_row SET n=(fenced_row.n + %(volcano_value_1)s::INTEGER), fencing_token=%(volcano_offered)s::BIGINT, fencing_key=%(volcano_offered_key)s::VARCHAR WHERE (fenced_row.n < %(volcano_value_0)s::INTEGER) AND fenced_row.fencing_token <= %(volcano_offered)s::BIGINT AND (fenced_row.fencing_key = %(volcano_offered_key)s::VARCHAR OR fenced_row.fencing_key = '');
SELECT fenced_row.fencing_token, fenced_row.fencing_key FROM fenced_row WHERE (fenced_row.n < %(volcano_value_0)s::INTEGER) AND (fenced_row.fencing_token > %(fencing_token_1)s::BIGINT OR fenced_row.fencing_token IS NULL OR (fenced_row.fencing_key NOT IN (%(fencing_key_1_1)s::VARCHAR, %(fencing_key_1_2)s::VARCHAR)) OR fenced_row.fencing_key IS NULL) LIMIT %(param_1)s::INTEGER FOR SHARE;
release savepoint;

-- update of rows that a subquery names: 4
savepoint;
SELECT fenced_row.fencing_token, fenced_row.fencing_key FROM fenced_row WHERE (fenced_row.id IN (SELECT fenced_row_1.id FROM fenced_row AS fenced_row_1 WHERE fenced_row_1.n < %(volcano_value_0)s::INTEGER)) FOR UPDATE;
UPDATE fenced_row SET n=%(volcano_value_1)s::INTEGER, fencing_token=%(volcano_offered)s::BIGINT, fencing_key=%(volcano_offered_key)s::VARCHAR WHERE (fenced_row.id IN (SELECT fenced_row_1.id FROM fenced_row AS fenced_row_1 WHERE fenced_row_1.n < %(volcano_value_0)s::INTEGER)) AND fenced_row.fencing_token <= %(volcano_offered)s::BIGINT AND (fenced_row.fencing_key = %(volcano_offered_key)s::VARCHAR OR fenced_row.fencing_key = '');
release savepoint;

-- update of many rows, stale: 4
savepoint;
UPDATE fenced_row SET n=(fenced_row.n + %(volcano_value_1)s::INTEGER), fencing_token=%(volcano_offered)s::BIGINT, fencing_key=%(volcano_offered_key)s::VARCHAR WHERE (fenced_row.n < %(volcano_value_0)s::INTEGER) AND fenced_row.fencing_token <= %(volcano_offered)s::BIGINT AND (fenced_row.fencing_key = %(volcano_offered_key)s::VARCHAR OR fenced_row.fencing_key = '');
SELECT fenced_row.fencing_token, fenced_row.fencing_key FROM fenced_row WHERE (fenced_row.n < %(volcano_value_0)s::INTEGER) AND (fenced_row.fencing_token > %(fencing_token_1)s::BIGINT OR fenced_row.fencing_token IS NULL OR (fenced_row.fencing_key NOT IN (%(fencing_key_1_1)s::VARCHAR, %(fencing_key_1_2)s::VARCHAR)) OR fenced_row.fencing_key IS NULL) LIMIT %(param_1)s::INTEGER FOR SHARE;
rollback savepoint;

-- delete of one row: 1
DELETE FROM fenced_row WHERE (fenced_row.id = %(volcano_value_0)s::INTEGER) AND fenced_row.fencing_token <= %(volcano_offered)s::BIGINT AND (fenced_row.fencing_key = %(volcano_offered_key)s::VARCHAR OR fenced_row.fencing_key = '');

-- delete of many rows: 5
savepoint;
DELETE FROM fenced_row WHERE fenced_row.fencing_token <= %(volcano_offered)s::BIGINT AND (fenced_row.fencing_key = %(volcano_offered_key)s::VARCHAR OR fenced_row.fencing_key = '');
SELECT fenced_row.fencing_token, fenced_row.fencing_key FROM fenced_row WHERE fenced_row.fencing_token > %(fencing_token_1)s::BIGINT OR fenced_row.fencing_token IS NULL OR (fenced_row.fencing_key NOT IN (%(fencing_key_1_1)s::VARCHAR, %(fencing_key_1_2)s::VARCHAR)) OR fenced_row.fencing_key IS NULL LIMIT %(param_1)s::INTEGER FOR SHARE;
release savepoint;
SELECT fenced_row.id FROM fenced_row WHERE fenced_row.id IN (%(id_1_1)s::INTEGER);

-- upsert of a row that is there: 1
UPDATE fenced_row SET n=%(volcano_value_1)s::INTEGER, fencing_token=%(volcano_offered)s::BIGINT, fencing_key=%(volcano_offered_key)s::VARCHAR WHERE (fenced_row.id = %(volcano_value_0)s::INTEGER) AND fenced_row.fencing_token <= %(volcano_offered)s::BIGINT AND (fenced_row.fencing_key = %(volcano_offered_key)s::VARCHAR OR fenced_row.fencing_key = '');

-- upsert of a row that is not there: 6
UPDATE fenced_row SET n=%(volcano_value_1)s::INTEGER, fencing_token=%(volcano_offered)s::BIGINT, fencing_key=%(volcano_offered_key)s::VARCHAR WHERE (fenced_row.id = %(volcano_value_0)s::INTEGER) AND fenced_row.fencing_token <= %(volcano_offered)s::BIGINT AND (fenced_row.fencing_key = %(volcano_offered_key)s::VARCHAR OR fenced_row.fencing_key = '');
SELECT fenced_row.fencing_token, fenced_row.fencing_key FROM fenced_row WHERE (fenced_row.id = %(volcano_value_0)s::INTEGER) LIMIT %(param_1)s::INTEGER;
SELECT fenced_row.fencing_token, fenced_row.fencing_key FROM fenced_row WHERE (fenced_row.id = %(volcano_value_0)s::INTEGER) LIMIT %(param_1)s::INTEGER FOR UPDATE;
savepoint;
INSERT INTO fenced_row (id, n, fencing_token, fencing_key) VALUES (%(id)s::INTEGER, %(n)s::INTEGER, %(fencing_token)s::BIGINT, %(fencing_key)s::VARCHAR);
release savepoint;

-- save of a loaded instance: 1
UPDATE fenced_row SET n=%(volcano_value_1)s::INTEGER, fencing_token=%(volcano_offered)s::BIGINT, fencing_key=%(volcano_offered_key)s::VARCHAR WHERE (fenced_row.id = %(volcano_value_0)s::INTEGER) AND fenced_row.fencing_token <= %(volcano_offered)s::BIGINT AND (fenced_row.fencing_key = %(volcano_offered_key)s::VARCHAR OR fenced_row.fencing_key = '');

-- transaction: 2
UPDATE volcano_locks_fence SET fencing_token=%(volcano_offered)s::BIGINT, advanced_at=%(volcano_now)s::TIMESTAMP WITH TIME ZONE WHERE volcano_locks_fence.key = %(volcano_key)s::VARCHAR AND volcano_locks_fence.fencing_token <= %(volcano_offered)s::BIGINT;
INSERT INTO note (id, text) VALUES (%(id)s::INTEGER, %(text)s::VARCHAR);

-- transaction, stale: 2
UPDATE volcano_locks_fence SET fencing_token=%(volcano_offered)s::BIGINT, advanced_at=%(volcano_now)s::TIMESTAMP WITH TIME ZONE WHERE volcano_locks_fence.key = %(volcano_key)s::VARCHAR AND volcano_locks_fence.fencing_token <= %(volcano_offered)s::BIGINT;
SELECT volcano_locks_fence.fencing_token FROM volcano_locks_fence WHERE volcano_locks_fence.key = %(volcano_key)s::VARCHAR LIMIT %(param_1)s::INTEGER;

